"""Ignite: an Engine whose iterations are updates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.data.sampler import CustomSampler, TraceLike
from variable_batch_size.integrations.from_loader import check_same_order, sampler_for
from variable_batch_size.integrations.loading import with_sampler
from variable_batch_size.integrations.settings import Settings, check_bare
from variable_batch_size.integrations.versions import require_version
from variable_batch_size.optim.consistency import broadcast_parameters
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.updates import Updates
from variable_batch_size.optim.wrapper import is_stepping
from variable_batch_size.rules import Rule

require_version("pytorch-ignite", "0.5.2", "ignite")

import ignite.handlers  # noqa: E402
from ignite.engine import (  # noqa: E402
    Engine,
    Events,
    State,
    supervised_training_step,
    supervised_training_step_amp,
)

from variable_batch_size.integrations.ignite.outputs import combine  # noqa: E402

Step = Callable[[Engine, Any], Any]
_DATASETS: WeakKeyDictionary[CustomSampler, Any] = WeakKeyDictionary()  # what `variable_batch` was told


def create_supervised_trainer(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    device: str | torch.device | None = None,
    *,
    loader: DataLoader[Any],
    trace: TraceLike,
    rule: Rule | str | Sequence[Rule | str] = "constant",
    ref_batchsize: int | None = None,
    sampler_options: Mapping[str, Any] | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    amp_mode: str | None = None,
    scaler: Any = False,
    **options: Any,
) -> VariableBatchEngine:
    """Return what Ignite's function of this name does, with a global batch size that follows a trace.

    An iteration of the engine is an update. Its output is that of `output_transform` over the whole update: of numbers,
    which should be means over rows, the mean over the samples of all ranks. The state of the engine includes the
    position in the training.

    Args:
        model: the model, on its device; not in DistributedDataParallel. Its parameters become those of rank 0.
        optimizer: the optimizer.
        loss_fn: the loss, a mean over rows.
        device: the device that batches are moved to.
        loader: the loader that `run` will get. Its `batch_size` is the largest number of rows of a microbatch.
        trace: the trace of the global batch size, see `CustomSampler`.
        rule: the learning-rate rule, see `CustomOptimizer`.
        ref_batchsize: batch size, in samples, at which the hyperparameters were tuned.
        sampler_options: further arguments of the `CustomSampler`, such as `seed` and `max_updates`.
        optimizer_options: further arguments of the `CustomOptimizer`, such as `max_grad_norm`.
        amp_mode: None, or "amp" for CUDA's autocast.
        scaler: True or a GradScaler with `amp_mode="amp"`.
        **options: further arguments of Ignite's function, such as `output_transform`.

    Raises:
        TypeError: if an argument has the wrong type, or the dataset no index.
        ValueError: if the engine is to be deterministic, or to accumulate itself, or a number is out of range.
    """
    if options.pop("deterministic", False):
        requirement = "deterministic must be False, because the sampler orders the samples by its seed"
        raise value_error(requirement, "True", "leave it out, and resume with vbs.Checkpoint")
    if (steps := options.pop("gradient_accumulation_steps", 1)) != 1:
        requirement = (
            "gradient_accumulation_steps must be 1, because the trace and the loader's batch_size determine it"
        )
        raise value_error(requirement, steps, "leave it out")
    if amp_mode not in (None, "amp"):
        raise value_error('amp_mode must be None or "amp"', repr(amp_mode), "pass one of them")
    check_bare(model)
    settings = {
        "sampler_options": sampler_options,
        "optimizer_options": {"model": model} | dict(optimizer_options or {}),
    }
    wrapped = variable_batch(optimizer, loader, trace=trace, rule=rule, ref_batchsize=ref_batchsize, **settings)
    broadcast_parameters(model, wrapped.backend)
    scaler = GradScaler() if scaler is True else scaler or None
    if amp_mode == "amp":
        step = supervised_training_step_amp(model, wrapped, loss_fn, device, scaler=scaler, **options)
    else:
        step = supervised_training_step(model, wrapped, loss_fn, device, **options)
    engine = VariableBatchEngine(step, wrapped)
    if scaler is not None:
        engine.state.scaler = scaler  # as Ignite's function does
    return engine


def variable_batch(
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *,
    trace: TraceLike,
    rule: Rule | str | Sequence[Rule | str] = "constant",
    ref_batchsize: int | None = None,
    sampler_options: Mapping[str, Any] | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
) -> CustomOptimizer:
    """Return the optimizer for a `VariableBatchEngine`, to be stepped after each microbatch.

    The arguments and errors are those of `create_supervised_trainer`. On several ranks call
    `vbs.broadcast_parameters(model)`, too.
    """
    settings = Settings(trace, rule, ref_batchsize, sampler_options or {}, optimizer_options or {})
    sampler = sampler_for(loader, settings)
    _DATASETS[sampler] = loader.dataset
    return settings.optimizer(optimizer, sampler)


def per_update(step: Step, optimizer: CustomOptimizer) -> Step:
    """Return a process function for an Engine whose batches are updates, as those of `vbs.updates` are.

    Its output has the structure of that of `step`: a number or 0-D tensor, which should be a mean over the rows of a
    microbatch, becomes the mean over the samples of the update, of all ranks; the rows of larger tensors are put
    together, those of this rank; of anything else the last one is returned.

    Args:
        step: the process function for a microbatch. It calls `optimizer.step()`; the step of an optimizer of torch that
            is not wrapped raises RuntimeError.
        optimizer: the optimizer.
    """

    def process(engine: Engine, update: Sequence[Any]) -> Any:
        outputs, samples = [], []
        with _no_other_steps(optimizer):
            for batch in update:
                microbatch = optimizer.microbatch
                samples.append(microbatch.samples)  # 0 if this rank repeats one, only because others have more
                outputs.append(step(engine, batch))
        return combine(outputs, samples, microbatch.batch_size, optimizer.backend)

    return process


@contextmanager
def _no_other_steps(optimizer: CustomOptimizer) -> Iterator[None]:
    """Raise RuntimeError if a plain optimizer is stepped within a block, which would do it for each microbatch."""

    def check(other: Optimizer, *_: object) -> None:
        if other is not optimizer.inner and not is_stepping():  # the wrapper's own message is for the inner one
            raise RuntimeError(
                f"within an update every optimizer must step once for the whole of it, but step() of the plain "
                f"{type(other).__name__} was called for a microbatch; wrap it as vbs.CustomOptimizer(other, "
                f"optimizer.sampler), or step it in a handler of Events.ITERATION_COMPLETED"
            )

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


class UpdateEpochs:
    """A handler with which an Engine counts updates and epochs as the optimizer does, also after a restore.

    Attach it before other handlers. `engine.state.epoch_length` is the number of updates of the epoch, and
    `engine.state.iteration` is `optimizer.updates`.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: CustomOptimizer) -> None:
        self._optimizer = optimizer
        self._last: Any = None  # the handler that ends an epoch
        self._epoch = 0  # the one under way

    def attach(self, engine: Engine) -> None:
        """Attach it to an engine whose process function is `per_update(...)`."""
        engine.add_event_handler(Events.STARTED, self._start)
        engine.add_event_handler(Events.EPOCH_STARTED, self._start_epoch)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._count)
        engine.add_event_handler(Events.TERMINATE_SINGLE_EPOCH, self._skip_epoch)

    def _start(self, engine: Engine) -> None:
        state, optimizer = engine.state, self._optimizer
        if not isinstance(state.dataloader, Updates):
            remedy = "pass vbs.updates(loader, optimizer) to run(), or use a VariableBatchEngine"
            raise type_error("the data must be updates of the optimizer", state.dataloader, remedy)
        if optimizer.sampler.clock.end_pending:  # restored at the end of an epoch, whose handlers are not run again
            for _ in state.dataloader:
                pass
        state.iteration, state.epoch = optimizer.updates, optimizer.epoch
        if state.iteration:
            state.epoch_length = None  # otherwise the engine takes epoch_length * max_epochs for the end
        if optimizer.done:
            engine.terminate()

    def _start_epoch(self, engine: Engine) -> None:
        optimizer, state = self._optimizer, engine.state
        self._epoch = optimizer.epoch
        state.iteration, state.epoch = optimizer.updates, optimizer.epoch + 1
        epoch = optimizer.sampler.plan.epoch(optimizer.epoch)
        state.epoch_length = epoch.updates
        # How many of them were made before a restore. The engine would take iteration % epoch_length, as if all epochs
        # were equally long, and has no public way to tell it.
        engine._init_iter = optimizer.updates - epoch.first_step
        if self._last is not None:
            self._last.remove()
        self._last = engine.add_event_handler(Events.EPOCH_COMPLETED, self._end_epoch)  # after those of the user

    def _count(self, engine: Engine) -> None:
        """Correct the length of the epoch, which is an estimate while a controller chooses batch sizes."""
        epoch = self._optimizer.sampler.clock.epoch
        engine.state.epoch_length = epoch.updates

    def _end_epoch(self, engine: Engine) -> None:
        state = engine.state
        state.epoch_length = None  # otherwise the engine takes epoch_length * max_epochs for the end
        if self._optimizer.done and (state.max_epochs is None or state.epoch < state.max_epochs):
            engine.terminate()

    def _skip_epoch(self, engine: Engine, iter_counter: int | None = None) -> None:
        """After `terminate_epoch()`: leave out the rest of the epoch."""
        optimizer = self._optimizer
        engine.state.epoch_length = None
        if optimizer.epoch == self._epoch:
            optimizer.sampler.set_epoch(self._epoch + 1)
            optimizer.set_epoch(self._epoch + 1)


class VariableBatchEngine(Engine):
    """An Engine whose iterations are updates; `step` is its process function for a microbatch.

    `run` gets the loader of the training, as ever, or nothing but the number of epochs if it had one before. A second
    `run` continues: `max_epochs` counts all epochs. `state_dict()` includes the position in the training.

    Args:
        step: the process function for a microbatch. It calls `optimizer.step()`.
        optimizer: the optimizer, such as `variable_batch` returns.

    Attributes:
        optimizer: the optimizer.
    """

    def __init__(self, step: Step, optimizer: CustomOptimizer) -> None:
        if not isinstance(optimizer, CustomOptimizer):
            raise type_error(
                "the optimizer must be a vbs.CustomOptimizer",
                optimizer,
                "pass what variable_batch(optimizer, loader, trace=...) returns, and let the step use it",
            )
        super().__init__(per_update(step, optimizer))
        self.optimizer = optimizer
        UpdateEpochs(optimizer).attach(self)

    def run(
        self,
        data: Iterable[Any] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> State:
        """Train until `max_epochs` epochs or `max_iters` updates are made; a UserWarning tells if they were before.

        Args:
            data: the loader of the training, or `vbs.updates` of one that reads the optimizer's sampler.
            max_epochs: number of epochs of the training, with those before a restore.
            max_iters: number of updates of the training; Ignite 0.5.5 or newer.
            epoch_length: must be None: it is the number of updates of each epoch.

        Raises:
            TypeError: if `data` is of another type.
            ValueError: if the loader has another dataset, or other settings, than the one that the optimizer was
                created with, or `epoch_length` is not None.
        """
        if epoch_length is not None:
            requirement = "epoch_length must be left out, because epochs have unequal numbers of updates"
            raise value_error(requirement, epoch_length, "pass max_epochs or max_iters only")
        updates = self._updates(data)
        limit = {} if max_iters is None else {"max_iters": max_iters}  # which Ignite has since 0.5.5
        before = self.optimizer.updates
        state = self.state if self.optimizer.done else super().run(updates, max_epochs, **limit)
        if self.optimizer.updates == before and (ended := self._ended()):
            warnings.warn(
                f"run() continues the training, but {ended}, so that it has made none; to go on pass a larger number, "
                f"and to train anew create model, optimizer and trainer again",
                UserWarning,
                stacklevel=2,
            )
        return state

    def state_dict(self) -> Any:
        """Return the state of the engine, with the position in the training under "vbs"."""
        state = super().state_dict()
        epoch = self.optimizer.sampler.clock.epoch
        state["epoch_length"] = max(1, epoch.updates)  # of a whole epoch, which Ignite demands
        state["vbs"] = self.optimizer.state_dict()["vbs"]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of the engine and the position in the training, on any number of ranks.

        Raises:
            ValueError: if the state has no position, or was saved with other samples.
        """
        if "vbs" not in state_dict:
            remedy = "load the state of a VariableBatchEngine, or begin anew"
            raise value_error('the state must hold the position in the training under "vbs"', "one without", remedy)
        optimizer = self.optimizer
        optimizer.load_state_dict({**optimizer.inner.state_dict(), "vbs": state_dict["vbs"]})
        kept = {name: value for name, value in state_dict.items() if name not in ("vbs", "iteration")}
        super().load_state_dict({**kept, "epoch": optimizer.epoch, "epoch_length": 1})  # not iteration // epoch_length
        self.state.iteration, self.state.epoch_length = optimizer.updates, None

    def _ended(self) -> str | None:
        """Return why no update is left, or None if one is."""
        state, optimizer = self.state, self.optimizer
        if optimizer.done:
            return f"it has ended after {optimizer.updates} updates, by max_updates, max_samples or its trace"
        if state.max_epochs is not None and optimizer.epoch >= state.max_epochs:
            return f"all updates of max_epochs={state.max_epochs} were made before"
        updates = getattr(state, "max_iters", None)  # which Ignite has since 0.5.5
        return (
            None if updates is None or optimizer.updates < updates else f"all of max_iters={updates} were made before"
        )

    def _updates(self, data: Iterable[Any] | None) -> Iterable[Any]:
        data = getattr(self.state, "dataloader", None) if data is None else data
        if isinstance(data, Updates):
            return data
        sampler = self.optimizer.sampler
        if not isinstance(data, DataLoader):
            raise type_error("the data must be a DataLoader", data, "pass the loader of the training")
        if data.batch_sampler is not sampler:
            check_same_order(data, sampler)
            if data.dataset is not _DATASETS.get(sampler, data.dataset):
                requirement = "the loader must have the very dataset that the optimizer was created for"
                raise value_error(requirement, "another one", "pass the loader that the trainer was created with")
            data = with_sampler(data, sampler)
        return Updates(data, self.optimizer)


class ProgressBar(ignite.handlers.ProgressBar):
    """Ignite's ProgressBar, which shows the updates of each epoch, although epochs have unequal numbers of them.

    Ignite's own one takes iteration % epoch_length for the position in the epoch.
    """

    pbar_cls: Any

    def attach(
        self,
        engine: Engine,
        metric_names: str | list[str] | None = None,
        output_transform: Callable[..., Any] | None = None,
        event_name: Any = Events.ITERATION_COMPLETED,
        closing_event_name: Any = Events.EPOCH_COMPLETED,
        state_attributes: list[str] | None = None,
    ) -> None:
        """Attach it to an engine, see Ignite."""
        if isinstance(engine, VariableBatchEngine) and event_name in (
            Events.ITERATION_STARTED,
            Events.ITERATION_COMPLETED,
        ):
            self.pbar_cls = _by_update(self.pbar_cls, engine)
        super().attach(engine, metric_names, output_transform, event_name, closing_event_name, state_attributes)


def _by_update(kind: type[Any], engine: Engine) -> type[Any]:
    """Return a class of tqdm's bars that are where the engine is in its epoch, whatever they are told."""

    def update(bar: Any, n: float = 1) -> bool | None:
        return kind.update(bar, engine.state.iteration - engine.optimizer.sampler.clock.epoch.first_step - bar.n)

    return type(kind.__name__, (kind,), {"update": update})
