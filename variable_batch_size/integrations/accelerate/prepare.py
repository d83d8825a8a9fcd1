"""Accelerate: `prepare` in the place of `accelerator.prepare`; the loop stays as it is."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import check_int, type_error, value_error
from variable_batch_size.data.sampler import TraceLike
from variable_batch_size.integrations.from_loader import sampler_for
from variable_batch_size.integrations.loading import with_sampler
from variable_batch_size.integrations.settings import Settings, check_bare
from variable_batch_size.integrations.versions import require_version
from variable_batch_size.optim.consistency import broadcast_parameters
from variable_batch_size.rules import Rule

require_version("accelerate", "1.10", "accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DDPCommunicationHookType,
    DistributedType,
    gather_object,
    recursively_apply,
)

from variable_batch_size.integrations.accelerate.objects import (  # noqa: E402
    VariableBatchLoader,
    VariableBatchOptimizer,
    VariableBatchScheduler,
)

T = TypeVar("T")
_WHOLE_MODELS = {name for name in DistributedType.__members__ if name == "NO" or name.startswith("MULTI_")}


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
    `accelerator.sync_gradients` is True for the last one of an update, and a scheduler steps once per update. From
    then on methods of `accelerator` that would be wrong within an update raise; see the page on Accelerate.

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
        steps_per_update: how many steps a prepared scheduler makes per update. Accelerate itself makes as many as there
            are processes: pass `accelerator.num_processes` for a schedule whose numbers of steps were multiplied by it.
            Default: 1, and on several processes a UserWarning when a scheduler is prepared.

    Returns:
        The prepared objects, in the same order. The optimizer also has the attributes and methods of a
        `CustomOptimizer`, such as `updates` and `current_lr()`; its `step()` returns whether the weights changed.

    Raises:
        TypeError: if an object has the wrong type, was prepared before, or the dataset has no index.
        ValueError: if there is not one optimizer, no model or no loader, the accelerator accumulates, shards models or
            divides batches itself, or an argument of the sampler or the optimizer is wrong.
        RuntimeError: if the accelerator has another training, or another optimizer.
    """
    _check_accelerator(accelerator)
    settings = Settings(trace, rule, ref_batchsize, sampler_options or {}, optimizer_options or {})
    models, (inner,), (loader, *_) = _sorted(objects)
    if accelerator._optimizers:  # those that it has prepared; there is no public way to know
        raise _one_optimizer("accelerator.prepare() got another one before prepare()")
    steps = _checked(steps_per_update, accelerator)
    world = {"num_replicas": accelerator.num_processes, "rank": accelerator.process_index}
    sampler = sampler_for(loader, settings, **world)
    prepared = {id(model): accelerator.prepare_model(model, evaluation_mode=True) for model in models}  # without DDP
    for model in models:
        check_bare(model)
        broadcast_parameters(model)
    if inner.state:
        inner.load_state_dict(inner.state_dict())  # moves it to the device of the parameters
    optimizer = settings.optimizer(inner, sampler, **_unused_parameters(accelerator))
    training = VariableBatchOptimizer(optimizer, accelerator.scaler)
    prepared[id(inner)] = accelerator.prepare_optimizer(training)
    prepared[id(loader)] = VariableBatchLoader(with_sampler(loader, sampler), optimizer, accelerator)
    _change_methods(accelerator, Training(training, prepared[id(loader)], steps))
    for other in objects:
        if isinstance(other, DataLoader) and other is not loader:
            prepared[id(other)] = accelerator.prepare_data_loader(other)
        elif isinstance(other, LRScheduler):
            prepared[id(other)] = accelerator.prepare_scheduler(other)
    result = tuple(prepared.get(id(one), one) for one in objects)
    return result if len(result) > 1 else result[0]


@final
@dataclass
class Training:
    """What an accelerator knows of the training.

    Attributes:
        optimizer: the prepared optimizer.
        loader: the prepared loader.
        steps_per_update: how many steps a scheduler makes per update; None if the user did not say.
    """

    optimizer: VariableBatchOptimizer
    loader: VariableBatchLoader
    steps_per_update: int | None

    def steps(self, accelerator: Accelerator) -> int:
        """Return how many steps a scheduler makes per update; the first time a UserWarning may tell."""
        if self.steps_per_update is None:
            self.steps_per_update, processes = 1, accelerator.num_processes
            if processes > 1 and accelerator.is_main_process and accelerator.step_scheduler_with_optimizer:
                warnings.warn(
                    f"a prepared scheduler steps once per update, where Accelerate itself makes {processes} steps on "
                    f"{processes} processes; leave * accelerator.num_processes out of its numbers of steps and pass "
                    f"steps_per_update=1 to prepare(), or pass steps_per_update=accelerator.num_processes",
                    UserWarning,
                    stacklevel=stacklevel_of_user(),
                )
        return self.steps_per_update


class VariableBatchMethods(Accelerator):
    """What an accelerator does otherwise once `prepare` was called with it."""

    variable_batch: Training | None

    def accumulate(self, *models: nn.Module) -> Any:
        """Return a context that does nothing: the loader has set `sync_gradients`, and no model synchronizes itself."""
        return super().accumulate(*models) if self.variable_batch is None else nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward; the optimizer weighs the microbatch."""
        if self.variable_batch is not None:
            _check_steps(self)
        super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Raise RuntimeError for parameters of the training, whose gradients are not complete."""
        parameters = self._apart(parameters, "clip_grad_norm_()", f'optimizer_options={{"max_grad_norm": {max_norm}}}')
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Raise RuntimeError for parameters of the training, whose gradients are not complete."""
        remedy = 'optimizer_options={"max_grad_norm": 1.0}, which clips by the norm,'
        super().clip_grad_value_(self._apart(parameters, "clip_grad_value_()", remedy), clip_value)

    def gather(self, tensor: Any) -> Any:
        """Gather over all processes, as ever; within an update, or with unequal shapes, it raises RuntimeError."""
        gather = self._together("gather()", super().gather)
        self._check_shapes("gather()", tensor)
        return gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather over all processes, as ever; within an update it raises RuntimeError."""
        return self._together("gather_for_metrics()", super().gather_for_metrics)(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over all processes, as ever; within an update, or with unequal shapes, it raises RuntimeError."""
        reduce = self._together("reduce()", super().reduce)
        self._check_shapes("reduce()", tensor)
        return reduce(tensor, reduction, scale)

    def pad_across_processes(self, *args: Any, **kwargs: Any) -> Any:
        """Pad to the size of the largest one, as ever; within an update it raises RuntimeError."""
        return self._together("pad_across_processes()", super().pad_across_processes)(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Wait for the other processes, as ever; within an update it raises RuntimeError."""
        self._together("wait_for_everyone()", super().wait_for_everyone)()

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError for a second optimizer, whose `step()` would depend on the updates of the first."""
        if self.variable_batch is not None and optimizer is not self.variable_batch.optimizer:
            raise _one_optimizer("accelerator.prepare() got another one after prepare()")
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler of the training, which then steps by update."""
        if self.variable_batch is not None and not isinstance(scheduler, VariableBatchScheduler):
            optimizer = self.variable_batch.optimizer
            if getattr(scheduler, "optimizer", None) in (optimizer, optimizer.optimizer, optimizer.optimizer.inner):
                steps = self.variable_batch.steps(self)
                scheduler = VariableBatchScheduler(scheduler, optimizer, steps, self.step_scheduler_with_optimizer)
        return super().prepare_scheduler(scheduler)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Raise RuntimeError for the training's loader, which continues by itself."""
        if isinstance(dataloader, VariableBatchLoader):
            if num_batches:
                raise RuntimeError(
                    f"the loader must yield all microbatches that are left of the epoch, but skip_first_batches() was "
                    f"asked to skip {num_batches}; iterate the loader itself: after load_state() it continues with the "
                    f"next update"
                )
            return dataloader
        return super().skip_first_batches(dataloader, num_batches)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save the states, the position in the training with that of the optimizer, as ever; between updates."""
        if self.variable_batch is not None and self.variable_batch.optimizer.inside_step:
            raise RuntimeError(
                "save_state() must be called between updates, but some microbatches of update "
                f"{self.variable_batch.optimizer.updates} are accumulated; call it after optimizer.step(), if "
                "accelerator.sync_gradients, or where a loop was left, as by KeyboardInterrupt, after "
                "optimizer.discard_step()"
            )
        return super().save_state(*args, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        """Release the objects of the training, as ever; another one may then be prepared."""
        self.variable_batch = None
        return super().free_memory(*objects)

    def _together(self, name: str, method: Callable[..., T]) -> Callable[..., T]:
        """Return a collective; raise RuntimeError within an update, where ranks may call it unequally often."""
        training = self.variable_batch
        if self.num_processes > 1 and training is not None and training.loader.under_way and not self.sync_gradients:
            raise RuntimeError(
                f"accelerator.{name} must be called on all ranks alike, but within an update they have unequal numbers "
                f"of microbatches; call it if accelerator.sync_gradients, with tensors of the same shape on all "
                f"processes (pad_across_processes() makes rows so), or average with optimizer.log(loss=loss) before "
                f'optimizer.step(), and optimizer.logged["loss"] after the update'
            )
        return method

    def _check_shapes(self, name: str, tensor: Any) -> None:
        """Raise RuntimeError if tensors of the training have unequal shapes, which aborts a process of gloo."""
        training = self.variable_batch
        if self.num_processes == 1 or training is None or self.gradient_state.active_dataloader is not training.loader:
            return
        own = recursively_apply(_shape_of, tensor, error_on_other_type=True)
        code = zlib.crc32(repr(own).encode())
        ends = torch.tensor([code, -code], device=self.device)  # the largest one and, negative, the smallest one
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        if ends.sum().item():
            shapes = gather_object([own])
            raise RuntimeError(
                f"accelerator.{name} must get tensors of the same shape on all processes, but the last microbatches of "
                f"an update have unequal numbers of rows: the shapes are {', '.join(map(str, shapes))}; call "
                f"accelerator.pad_across_processes(tensor) first, or take means"
            )

    def _apart(self, parameters: Any, name: str, remedy: str) -> list[torch.Tensor]:
        """Return the parameters as a list; raise RuntimeError if some are of the training."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.variable_batch is not None:
            groups = self.variable_batch.optimizer.param_groups
            own = {id(parameter) for group in groups for parameter in group["params"]}
            if not own.isdisjoint(map(id, parameters)):
                raise RuntimeError(
                    f"accelerator.{name} must see the whole gradient of an update, but the gradients of all "
                    f"microbatches and ranks come together only in optimizer.step(); remove this line, and pass "
                    f"{remedy} to prepare(), and read optimizer.grad_norm"
                )
        return parameters


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _change_methods(accelerator: Accelerator, training: Training) -> None:
    """Let the accelerator, of whatever class, have the methods of `VariableBatchMethods`."""
    kind = type(accelerator)
    if not isinstance(accelerator, VariableBatchMethods):
        accelerator.__class__ = type(kind.__name__, (VariableBatchMethods, kind), {"__module__": kind.__module__})
    accelerator.variable_batch = training


def _check_accelerator(accelerator: Accelerator) -> None:
    if not isinstance(accelerator, Accelerator):
        raise type_error("accelerator must be an Accelerator", accelerator, "pass the accelerator, then the objects")
    if getattr(accelerator, "variable_batch", None) is not None:
        raise RuntimeError(
            "prepare() must be called once for a training, but this accelerator has one; pass all its objects in one "
            "call, and before another training call accelerator.free_memory()"
        )
    kind, state = accelerator.distributed_type, accelerator.state
    if kind.name not in _WHOLE_MODELS or state.deepspeed_plugin is not None or accelerator.parallelism_config:
        requirement = "every process must train the whole model, with gradients that the optimizer sums"
        found = "a ParallelismConfig" if kind.name in _WHOLE_MODELS and accelerator.parallelism_config else kind.name
        remedy = "leave the FSDP, DeepSpeed, Megatron, tensor parallel or XLA configuration out"
        raise value_error(requirement, found, remedy)
    if accelerator.mixed_precision == "fp8":
        raise value_error('mixed_precision must be "no", "bf16" or "fp16"', "fp8", "pass one of them")
    for name in "split_batches", "dispatch_batches":
        if getattr(accelerator, name):
            requirement = f"{name} must be left out, because the sampler tells each process which samples to read"
            raise value_error(requirement, "True", f"create the DataLoaderConfiguration without {name}")
    hook = getattr(accelerator.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
    if hook != DDPCommunicationHookType.NO:
        requirement = "comm_hook must be left out, because the optimizer sums the gradients"
        raise value_error(requirement, hook, "create the DistributedDataParallelKwargs without it")
    _check_steps(accelerator)


def _checked(steps_per_update: int | None, accelerator: Accelerator) -> int | None:
    if steps_per_update is None:
        return None
    steps = check_int(steps_per_update, "steps_per_update", 1, remedy="pass 1 or accelerator.num_processes")
    if steps > 1 and not accelerator.step_scheduler_with_optimizer:
        requirement = "steps_per_update must be 1 with step_scheduler_with_optimizer=False, where the loop steps"
        raise value_error(requirement, steps, "leave it out")
    return steps


def _one_optimizer(found: str) -> RuntimeError:
    return RuntimeError(
        f"an accelerator must have one optimizer, because accelerator.sync_gradients tells the end of its updates, but "
        f"{found}; train several optimizers with the objects of vbs instead"
    )


def _check_steps(accelerator: Accelerator) -> None:
    if (steps := accelerator.gradient_accumulation_steps) != 1:
        requirement = (
            "gradient_accumulation_steps must be 1, because the trace and the loader's batch_size determine it"
        )
        raise value_error(requirement, steps, "create the Accelerator without it")


def _sorted(objects: Sequence[Any]) -> tuple[list[nn.Module], list[Optimizer], list[DataLoader[Any]]]:
    """Return models, the optimizer and loaders among the objects."""
    models = [one for one in objects if isinstance(one, nn.Module)]
    optimizers = [one for one in objects if isinstance(one, Optimizer)]
    loaders = [one for one in objects if isinstance(one, DataLoader)]
    for one in (*optimizers, *loaders):
        if getattr(one, "_is_accelerate_prepared", False):  # Accelerate's own mark of what it has prepared
            requirement = "prepare() must get the optimizer and the loaders as they were created"
            raise type_error(requirement, one, "call it instead of accelerator.prepare(), and not after it")
    if len(optimizers) != 1 or not models or not loaders:
        requirement = "prepare() must get models, one optimizer, and the loader of the training before any others"
        found = f"{len(models)} models, {len(optimizers)} optimizers and {len(loaders)} loaders"
        remedy = "pass them in one call, and train several optimizers with the objects of vbs instead"
        raise value_error(requirement, found, remedy)
    return models, optimizers, loaders


def _unused_parameters(accelerator: Accelerator) -> dict[str, bool]:
    """Return what `DistributedDataParallelKwargs` says about unused parameters."""
    wanted = bool(getattr(accelerator.ddp_handler, "find_unused_parameters", False))
    return {"find_unused_parameters": True} if wanted else {}
