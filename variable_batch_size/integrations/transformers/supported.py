"""The settings of a Trainer that are supported."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.integrations.accelerate import distributed_type, sums_by_torch
from variable_batch_size.integrations.supported import Setting, check

_OWN_STEPS = "lomo", "layerwise", "schedule_free"  # in names of optimizers that step in backward, or have two modes
OFF = False, None


def check_settings(trainer: Any) -> None:
    """Check the settings of a trainer with a variable batch size.

    Raises:
        ValueError: if one is not supported.
    """
    check(SETTINGS, trainer, "transformers")


def _saves_shards(state: Any) -> bool:
    return "SHARDED" in str(getattr(getattr(state, "fsdp_plugin", None), "state_dict_type", ""))


def _known(args: Any) -> str:
    """Return the order of samples; that by length is as good as another one where the number of updates is given."""
    order: str = args.train_sampling_strategy
    return "random" if order == "group_by_length" else order


def _ends_by_estimate(trainer: Any) -> bool:
    settings = trainer._settings
    return isinstance(settings.trace, AdaptiveTrace) and trainer.args.max_steps <= 0 and settings.ref_batchsize is None


SETTINGS = (
    Setting(
        "distributed_type",
        "NO, FSDP2, or MULTI_GPU, MULTI_CPU and others for which Accelerate uses DistributedDataParallel",
        lambda trainer: distributed_type(trainer.accelerator),
        sums_by_torch,
        "launch it without DeepSpeed, Megatron-LM, PyTorch/XLA or FSDP1; to shard the model pass fsdp=True and "
        'fsdp_config={"fsdp_version": 2}',
    ),
    Setting(
        "parallelism_config",
        "without tensor, context and sequence parallelism, so that every rank has samples of its own",
        lambda trainer: trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size(),
        (1,),
        "leave it out",
    ),
    Setting(
        "world_size of the training arguments",
        "the number of all processes that were launched",
        "args.world_size",
        lambda size: not dist.is_initialized() or size == dist.get_world_size(),
        "pass use_cpu=True if they have no GPU",
    ),
    Setting(
        "n_gpu", "at most 1 in a process", "args.n_gpu", (0, 1), "launch it with torchrun, or set CUDA_VISIBLE_DEVICES"
    ),
    Setting(
        "gradient_accumulation_steps",
        "1, because the trace says how many samples an update has",
        "args.gradient_accumulation_steps",
        (1,),
        "leave it out, and pass the microbatch as per_device_train_batch_size",
    ),
    Setting("auto_find_batch_size", "False", "args.auto_find_batch_size", OFF, "choose the microbatch"),
    Setting(
        "num_train_epochs",
        "> 0 without max_steps",
        lambda trainer: trainer.args.num_train_epochs if trainer.args.max_steps <= 0 else 1,
        lambda epochs: epochs > 0,
        "pass one, or max_steps",
    ),
    Setting(
        "ref_batchsize",
        "a number with an AdaptiveTrace and without max_steps, because schedules count samples in its units",
        lambda trainer: None if _ends_by_estimate(trainer) else 1,
        lambda size: size is not None,
        "pass it, or max_steps",
    ),
    Setting(
        "train_sampling_strategy",
        '"random" or "sequential", or "group_by_length" with max_steps',
        lambda trainer: trainer.args.train_sampling_strategy if trainer.args.max_steps <= 0 else _known(trainer.args),
        ("random", "sequential"),
        "leave it out, or pass max_steps",
    ),
    Setting(
        "load_best_model_at_end",
        "False with FSDP2's SHARDED_STATE_DICT: ranks of Trainer may choose different checkpoints (seen with 5.24)",
        lambda trainer: trainer.args.load_best_model_at_end and _saves_shards(trainer.accelerator.state),
        OFF,
        "pass state_dict_type FULL_STATE_DICT in fsdp_config",
    ),
    Setting("fp16", "False, because its scaler is not supported here", "args.fp16", OFF, "pass bf16=True"),
    Setting(
        "optim",
        "an optimizer that makes its update in step() and has one mode, unlike LOMO, layerwise and schedule-free ones",
        lambda trainer: getattr(trainer.args.optim, "value", trainer.args.optim),
        lambda name: not any(word in name for word in _OWN_STEPS),
        'pass "adamw_torch", for example',
    ),
    Setting(
        "enable_jit_checkpoint",
        "False: it saves within updates",
        "args.enable_jit_checkpoint",
        OFF,
        "save by save_steps",
    ),
)
