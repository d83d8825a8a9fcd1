"""The settings of a Trainer that are supported."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.integrations.supported import Setting


def _distributed_type(accelerator: Any) -> str:
    """Return the `distributed_type` of an accelerator, with the version of FSDP, such as "FSDP2"."""
    kind = accelerator.distributed_type.value
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return f"FSDP{plugin.fsdp_version}" if kind == "FSDP" and plugin is not None else str(kind)


def _ranks_of_model(trainer: Any) -> Any:
    """Return the number of ranks that share one model, by tensor, context and sequence parallelism."""
    return trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()


def _needed_steps(trainer: Any) -> int:
    """Return `max_steps` of a training that needs it, because the lengths of its epochs are not known; 1 otherwise."""
    groups = trainer.args.train_sampling_strategy == "group_by_length"
    return int(trainer.args.max_steps) if groups or isinstance(trainer.settings.trace, AdaptiveTrace) else 1


def _training_argument(name: str, supported: str, allowed: tuple[Any, ...], remedy: str) -> Setting:
    return Setting(name, supported, attrgetter(f"args.{name}"), allowed, remedy)


def _repeating_class(trainer: Any) -> str:
    """Return the class of trl that a trainer is, if it reads samples several times, or "none"."""
    names = [kind.__name__ for kind in type(trainer).__mro__]
    return next((name for name in names if name in ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer")), "none")


SETTINGS = (
    Setting(
        "the trainer",
        "one that reads each sample once an epoch, unlike GRPOTrainer, RLOOTrainer and DistillationTrainer of trl",
        _repeating_class,
        ("none",),
        "write a loop of your own, as examples/rollouts.py has it",
    ),
    Setting(
        "loss_type of trl's KTOTrainer",
        "one without a KL term, which compares the rows of a microbatch",
        lambda trainer: getattr(trainer, "calculate_KL", False) and trainer.args.loss_type,
        (False,),
        'pass loss_type="apo_zero_unpaired", or use DPOTrainer',
    ),
    Setting(
        "distributed_type",
        "NO, FSDP2, or MULTI_GPU, MULTI_CPU and others for which Accelerate uses DistributedDataParallel",
        lambda trainer: _distributed_type(trainer.accelerator),
        lambda kind: kind in ("NO", "FSDP2") or kind.startswith("MULTI_"),  # which torch sums
        'launch it without DeepSpeed and FSDP1; to shard pass fsdp=True and fsdp_config={"fsdp_version": 2}',
    ),
    Setting("parallelism_config", "one of data only", _ranks_of_model, (1,), "omit tensor, context and sequence sizes"),
    _training_argument("n_gpu", "at most 1 in a process", (0, 1), "launch it with torchrun"),
    _training_argument("gradient_accumulation_steps", "1", (1,), "omit it: the trace says"),
    _training_argument(
        "auto_find_batch_size",
        "False, because its second attempt begins with weights that the first one has moved",
        (False,),
        "pass per_device_train_batch_size, the rows of a microbatch that fit",
    ),
    Setting(
        "max_steps",
        "> 0 with an AdaptiveTrace or group_by_length, whose epochs have no known length",
        _needed_steps,
        lambda steps: steps > 0,
        "pass max_steps=, the number of updates",
    ),
    _training_argument("include_num_input_tokens_seen", '"no"', ("no",), "log the samples"),
    _training_argument("fp16", "False, because its scaler is not supported here", (False,), "pass bf16=True"),
    Setting(
        "optim",
        "an optimizer that makes its update in step() and has one mode, unlike LOMO, layerwise and schedule-free ones",
        lambda trainer: getattr(trainer.args.optim, "value", trainer.args.optim),
        lambda name: not any(word in name for word in ("lomo", "layerwise", "schedule_free")),
        'pass "adamw_torch", for example',
    ),
    _training_argument("enable_jit_checkpoint", "False", (False,), "save by save_steps"),
)
