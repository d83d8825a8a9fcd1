"""Accelerate: `prepare` in the place of `accelerator.prepare`; the loop stays as it is."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import type_error, value_error
from variable_batch_size.data.sampler import TraceLike
from variable_batch_size.integrations.from_loader import sampler_for
from variable_batch_size.integrations.loading import with_sampler
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.integrations.supported import Setting, check
from variable_batch_size.integrations.versions import require_version
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.rules import Rule

require_version("accelerate", "1.13", "accelerate")

from accelerate import Accelerator  # noqa: E402

from variable_batch_size.integrations.accelerate.loader import VariableBatchLoader  # noqa: E402
from variable_batch_size.integrations.accelerate.optimizer import (  # noqa: E402
    Position,
    VariableBatchOptimizer,
    VariableBatchScheduler,
    is_prepared,
)
from variable_batch_size.integrations.accelerate.sums import (  # noqa: E402
    distributed_type,
    sum_in_float32,
    sums_by_torch,
)

_DEALT = "None or False, because the sampler tells each process which samples to read"
_WITHOUT = "create the DataLoaderConfiguration without it"
SETTINGS = (
    Setting(
        "distributed_type",
        "NO, FSDP2, or MULTI_GPU, MULTI_CPU and others for which Accelerate uses DistributedDataParallel",
        distributed_type,
        sums_by_torch,
        "leave DeepSpeed, Megatron-LM, XLA and FSDP1 out; pass FullyShardedDataParallelPlugin(fsdp_version=2)",
    ),
    Setting(
        "parallelism_config",
        "None, so that every process has samples of its own",
        "parallelism_config",
        (None,),
        "leave it out",
    ),
    Setting(
        "gradient_accumulation_steps",
        "1, because the trace and the loader's batch_size determine it",
        "gradient_accumulation_steps",
        (1,),
        "create the Accelerator without it",
    ),
    Setting("mixed_precision", '"no", "bf16" or "fp16"', "mixed_precision", ("no", "bf16", "fp16"), "pass one of them"),
    Setting("split_batches", _DEALT, "split_batches", (None, False), _WITHOUT),
    Setting("dispatch_batches", _DEALT, "dispatch_batches", (None, False), _WITHOUT),
)


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    trace: TraceLike,
    rule: Rule | str | Sequence[Rule | str] = "constant",
    ref_batchsize: int | None = None,
    sampler_options: Mapping[str, Any] | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    steps_per_update: int | None = None,
) -> Any:
    """Prepare the objects of a training whose global batch size follows a trace.

    Call it instead of `accelerator.prepare(*objects)`; the loop stays as it is. A batch of the loader is a microbatch;
    `accelerator.sync_gradients` is True for the last one of an update, and a scheduler steps once per update. On
    `accelerator` itself, `backward`, `clip_grad_norm_`, `clip_grad_value_`, `accumulate`, `prepare_optimizer` and
    `prepare_scheduler` are from then on those of the training, until `free_memory`.

    Args:
        accelerator: the accelerator.
        *objects: as for `accelerator.prepare`: models, one optimizer, the DataLoader of the training and perhaps
            further ones, which Accelerate prepares as ever, and schedulers of torch. The loader's `batch_size` is the
            largest number of rows of a microbatch.
        trace: the trace of the global batch size, see `CustomSampler`.
        rule: the learning-rate rule, see `CustomOptimizer`.
        ref_batchsize: batch size, in samples, at which the hyperparameters were tuned.
        sampler_options: further arguments of the `CustomSampler`, such as `seed` and `max_updates`.
        optimizer_options: further arguments of the `CustomOptimizer`, such as `max_grad_norm`.
        steps_per_update: how many steps a prepared scheduler makes per update, 1 or `accelerator.num_processes`.
            Accelerate itself makes as many as there are processes, for schedules whose numbers of steps were multiplied
            by it. Default: 1, and on several processes a UserWarning when a scheduler is prepared.

    Returns:
        The prepared objects, in the same order. The optimizer also has the attributes and methods of a
        `CustomOptimizer`, such as `updates` and `current_lr()`; its `step()` returns whether the weights changed.

    Raises:
        TypeError: if an object has the wrong type, was prepared before, or the dataset has no index.
        ValueError: if there is not one optimizer, no model or no loader, a setting of the accelerator is not supported,
            or an argument of the sampler or the optimizer is wrong.
        RuntimeError: if the accelerator has another training.
    """
    if not isinstance(accelerator, Accelerator):
        raise type_error("accelerator must be an Accelerator", accelerator, "pass the accelerator, then the objects")
    if "accumulate" in vars(accelerator):
        raise RuntimeError(
            "prepare() must be called once for a training, but this accelerator has one; pass all its objects in one "
            "call, and before another training call accelerator.free_memory()"
        )
    check(SETTINGS, accelerator, "accelerate")
    if steps_per_update not in (None, 1, accelerator.num_processes):
        requirement = f"steps_per_update must be 1 or accelerator.num_processes, {accelerator.num_processes}"
        raise value_error(requirement, steps_per_update, "pass one of them")
    settings = Settings(trace, rule, ref_batchsize, sampler_options or {}, optimizer_options or {})
    models, inner, loader = _sorted(objects)
    sampler = sampler_for(loader, settings, num_replicas=accelerator.num_processes, rank=accelerator.process_index)
    sharded = distributed_type(accelerator) == "FSDP2"
    sum_in_float32(accelerator)
    trained = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    own = [model for model in models if any(id(parameter) in trained for parameter in model.parameters())]
    if sharded:
        *ready, wrapped = accelerator.prepare(*models, inner)  # which exchanges the parameters of the optimizer
        inner = wrapped.optimizer
    else:
        ready = [accelerator.prepare_model(model) for model in models]
        if inner.state:
            inner.load_state_dict(inner.state_dict())  # moves it to the device of the parameters
    prepared: dict[int, Any] = {id(model): done for model, done in zip(models, ready, strict=True)}
    model = _one_model([prepared[id(model)] for model in own])
    optimizer = settings.optimizer(inner, sampler, **({} if model is None else {"model": model}))
    training = VariableBatchOptimizer(optimizer, accelerator.scaler, len(loader))
    if sharded:
        accelerator.register_for_checkpointing(Position(optimizer))
    else:
        accelerator.prepare_optimizer(training)  # so that its state has the position
    prepared |= {
        id(one): training
        if isinstance(one, Optimizer)
        else VariableBatchLoader(with_sampler(loader, sampler), optimizer, accelerator)
        for one in objects
        if isinstance(one, Optimizer) or one is loader
    }
    _set_methods(accelerator, training, steps_per_update)
    for other in objects:
        if id(other) not in prepared and isinstance(other, (DataLoader, LRScheduler)):
            prepared[id(other)] = accelerator.prepare(other)
    result = tuple(prepared.get(id(one), one) for one in objects)
    return result if len(result) > 1 else result[0]


def _set_methods(accelerator: Any, training: VariableBatchOptimizer, steps_per_update: int | None) -> None:
    """Set methods of the user's own accelerator: a copy would leave that one silently wrong."""
    optimizer: CustomOptimizer = training.optimizer
    names = "clip_grad_norm_", "clip_grad_value_", "prepare_optimizer", "prepare_scheduler"
    theirs, steps = {name: getattr(accelerator, name) for name in names}, steps_per_update
    saving = accelerator.register_save_state_pre_hook(lambda *_: optimizer.state_dict())  # raises within an update

    def backward(loss: torch.Tensor, **options: Any) -> None:
        optimizer.backward(loss, scaler=accelerator.scaler, **options)

    def is_own(parameters: list[torch.Tensor]) -> bool:
        given = {id(parameter) for parameter in parameters}
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        found = [id(parameter) in given for parameter in trained]
        if any(found) and not all(found):
            requirement = "gradients must be clipped by the norm of all parameters of the training"
            raise value_error(requirement, f"{sum(found)} of {len(found)}", "pass all, or clip in a step pre-hook")
        return any(found)

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if not is_own(parameters := _listed(parameters)):
            return theirs["clip_grad_norm_"](parameters, max_norm, norm_type)
        if norm_type != 2:
            raise value_error("norm_type must be 2 for the parameters of the training", norm_type, "leave it out")
        optimizer.max_grad_norm = float(max_norm)
        norm = optimizer.grad_norm
        return torch.zeros((), device=accelerator.device) if norm is None else norm

    def clip_grad_value_(parameters: Any, clip_value: float) -> None:
        if is_own(parameters := _listed(parameters)):
            raise RuntimeError(
                "clip_grad_value_() must see the whole gradient of an update, but it is complete only within "
                "optimizer.step(); clip by the norm, or in optimizer.register_step_pre_hook()"
            )
        theirs["clip_grad_value_"](parameters, clip_value)

    def scheduler_by_update(scheduler: Any) -> Any:
        nonlocal steps
        own = training, optimizer, optimizer.inner
        if not isinstance(scheduler, VariableBatchScheduler) and getattr(scheduler, "optimizer", None) in own:
            steps = _steps(accelerator) if steps is None else steps
            scheduler = VariableBatchScheduler(scheduler, training, steps, accelerator.step_scheduler_with_optimizer)
        return theirs["prepare_scheduler"](scheduler)

    def one_optimizer(other: Any, *args: Any, **options: Any) -> Any:
        if other is not training:
            raise RuntimeError(
                "an accelerator must have one optimizer, because accelerator.sync_gradients tells the end of its "
                "updates, but prepare_optimizer() got another one; train several optimizers with the objects of vbs"
            )
        return theirs["prepare_optimizer"](other, *args, **options)

    def free_memory(*objects: Any) -> Any:
        saving.remove()
        for name in methods:
            vars(accelerator).pop(name, None)  # the methods of the class are there again
        return accelerator.free_memory(*objects)

    methods = {
        "backward": backward,
        "clip_grad_norm_": clip_grad_norm_,
        "clip_grad_value_": clip_grad_value_,
        "accumulate": lambda *_: nullcontext(),  # the loader sets sync_gradients, and the optimizer the reduction
        "prepare_optimizer": one_optimizer,
        "prepare_scheduler": scheduler_by_update,
        "free_memory": free_memory,
    }
    vars(accelerator).update(methods)


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _steps(accelerator: Accelerator) -> int:
    processes = accelerator.num_processes
    if processes > 1 and accelerator.is_main_process and accelerator.step_scheduler_with_optimizer:
        warnings.warn(
            f"a prepared scheduler steps once per update, where Accelerate itself makes {processes} steps on "
            f"{processes} processes; leave * accelerator.num_processes out of its numbers of steps and pass "
            f"steps_per_update=1 to prepare(), or pass steps_per_update=accelerator.num_processes",
            UserWarning,
            stacklevel=stacklevel_of_user(),
        )
    return 1


def _one_model(models: Sequence[nn.Module]) -> nn.Module | None:
    """Return the model of the optimizer, for sums that it makes itself; several plain ones in one module."""
    if len(models) == 1:
        return models[0]
    if any(isinstance(model, DistributedDataParallel) for model in models):
        remedy = "put all parts that it trains into one module"
        raise value_error("an optimizer must train one DistributedDataParallel", f"{len(models)} models", remedy)
    return nn.ModuleList(models) if models else None


def _sorted(objects: Sequence[Any]) -> tuple[list[nn.Module], Optimizer, DataLoader[Any]]:
    """Return models, the optimizer, and the loader of the training among the objects."""
    models = [one for one in objects if isinstance(one, nn.Module)]
    optimizers = [one for one in objects if isinstance(one, Optimizer)]
    loaders = [one for one in objects if isinstance(one, DataLoader)]
    for one in (*optimizers, *loaders):
        if is_prepared(one):
            requirement = "prepare() must get the optimizer and the loaders as they were created"
            raise type_error(requirement, one, "call it instead of accelerator.prepare(), and not after it")
    if len(optimizers) != 1 or not models or not loaders:
        requirement = "prepare() must get models, one optimizer, and the loader of the training before any others"
        found = f"{len(models)} models, {len(optimizers)} optimizers and {len(loaders)} loaders"
        remedy = "pass them in one call, and train several optimizers with the objects of vbs instead"
        raise value_error(requirement, found, remedy)
    return models, optimizers[0], loaders[0]
