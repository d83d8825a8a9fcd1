"""Training arguments of transformers that contradict a changing batch size, or that it does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import DataLoader

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.from_loader import shuffles

_SHARDED = {"DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"}
_OWN_STEPS = ("lomo", "layerwise", "schedule_free")  # in names of optimizers that step in backward, or have two modes


class Refusal(NamedTuple):
    """An argument that is refused: the requirement, what was found, and what to do."""

    requirement: str
    found: object
    remedy: str


def check_arguments(trainer: Any) -> None:
    """Check the arguments of a trainer with a variable batch size.

    Raises:
        ValueError: if one is not supported.
    """
    for refusal in _refusals(trainer):
        raise value_error(*refusal)


def check_order(loader: DataLoader[Any], sampler: CustomSampler, args: Any) -> None:
    """Check that a trainer's own loader reads the samples that `sampler` deals, in the same order.

    Raises:
        TypeError: if it has a sampler of its own, which deals others.
        ValueError: if it shuffles, or drops the last batch, unlike the training arguments.
    """
    batches: Any = loader.batch_sampler
    batches = getattr(batches, "batch_sampler", batches)  # below accelerate's, which deals batches to the ranks
    if type(batches).__name__ != "BatchSampler":  # torch's or torchdata's; a class below it may choose samples
        check_deals(batches)
    check_deals(batches.sampler)
    if shuffles(batches.sampler) != sampler.shuffle:
        strategy, remedy = args.train_sampling_strategy, '"sequential" in the training arguments, or shuffle=True'
        found = f"{type(batches.sampler).__name__} with {strategy!r}"
        raise value_error("the loader must have the order of train_sampling_strategy", found, f"pass {remedy} there")
    if batches.drop_last != args.dataloader_drop_last:
        remedy = f"pass dataloader_drop_last={batches.drop_last} in the training arguments"
        raise value_error("the loader must drop the last batch as the arguments say", args.dataloader_drop_last, remedy)


def check_deals(sampler: Any) -> None:
    """Check that a sampler deals each sample once an epoch, in order or shuffled.

    Raises:
        TypeError: if not.
    """
    try:
        shuffles(sampler)
    except TypeError:
        raise type_error(
            "the trainer's loader must read each sample once an epoch, in order or shuffled, because the trace "
            "determines which samples make up an update",
            sampler,
            "leave out sampler= and _get_train_sampler if they are yours, and put a choice of samples into the "
            "dataset; a Trainer that repeats samples, such as trl's GRPOTrainer, cannot be used",
        ) from None


def _refusals(trainer: Any) -> Iterator[Refusal]:
    args, accelerator = trainer.args, trainer.accelerator
    if args.gradient_accumulation_steps != 1:
        yield Refusal(
            "gradient_accumulation_steps must be 1, because the trace says how many samples an update has",
            args.gradient_accumulation_steps,
            "leave it out, and pass the microbatch as per_device_train_batch_size",
        )
    if args.max_steps <= 0 and args.num_train_epochs <= 0:
        yield Refusal("num_train_epochs must be > 0", args.num_train_epochs, "pass one, or max_steps")
    if dist.is_initialized() and dist.get_world_size() != args.world_size:
        yield Refusal(  # Trainer would train on each of them alone
            f"the trainer must see all {dist.get_world_size()} processes that were launched",
            f"world_size={args.world_size} of the training arguments",
            "pass use_cpu=True if they have no GPU",
        )
    if accelerator.distributed_type.value in _SHARDED:
        yield Refusal(
            "the model must be a whole one on every rank",
            f"distributed_type={accelerator.distributed_type.value}",
            "launch the script with torchrun, without DeepSpeed, FSDP or PyTorch/XLA",
        )
    if trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() != 1:
        yield Refusal("every rank must have samples of its own", "a parallelism_config", "leave it out")
    if args.n_gpu > 1:
        remedy = "launch it with torchrun, or set CUDA_VISIBLE_DEVICES"
        yield Refusal("a process must train on one GPU", f"{args.n_gpu} GPUs", remedy)
    if args.fp16:
        yield Refusal("fp16 must be False, because its scaler is not supported here", True, "pass bf16=True")
    if args.auto_find_batch_size:
        remedy = "choose per_device_train_batch_size; the batch size does not depend on it"
        yield Refusal("auto_find_batch_size must be False", True, remedy)
    if args.enable_jit_checkpoint:
        remedy = "save by save_steps"
        yield Refusal("enable_jit_checkpoint must be False, because it saves within an update", True, remedy)
    if args.train_sampling_strategy not in ("random", "sequential"):
        yield Refusal(
            'train_sampling_strategy must be "random" or "sequential", because the trace says which samples an update '
            "has",
            repr(args.train_sampling_strategy),
            "leave it out",
        )
    if any(word in str(getattr(args.optim, "value", args.optim)) for word in _OWN_STEPS):
        remedy = 'pass another one, such as "adamw_torch"'
        yield Refusal("optim must be an optimizer that makes its update in step()", args.optim.value, remedy)
    settings = trainer._settings
    if isinstance(settings.trace, AdaptiveTrace) and args.max_steps <= 0 and settings.ref_batchsize is None:
        yield Refusal(
            "a training of so many epochs with an AdaptiveTrace needs a ref_batchsize, in whose updates the schedule "
            "of the learning rate counts",
            None,
            "pass ref_batchsize, or max_steps in the training arguments",
        )
