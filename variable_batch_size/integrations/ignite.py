"""Ignite: an Engine whose iterations are updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from variable_batch_size._validation import type_error
from variable_batch_size.data.plan.plan import Epoch
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.loading import sampler_for, with_sampler
from variable_batch_size.integrations.loss_check import WITH_CLASS_WEIGHTS, LossCheck
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.integrations.versions import require_version
from variable_batch_size.optim.checks.consistency import broadcast_parameters
from variable_batch_size.optim.loops.updates import Updates
from variable_batch_size.optim.optimizer import CustomOptimizer

_REMEDY = (
    f"let loss_fn return a mean over rows, with class weights {WITH_CLASS_WEIGHTS}; for a mean over tokens write a "
    "step of your own, with variable_batch()"
)

require_version("pytorch-ignite", "0.5.2", "ignite")

from ignite.engine import Engine, Events, State, _prepare_batch  # noqa: E402


def create_supervised_trainer(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., tuple[Any, Any]] = _prepare_batch,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = lambda x, y, y_pred, loss: loss.item(),
    *,
    loader: DataLoader[Any],
    model_fn: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
    **settings: Any,
) -> VariableBatchEngine:
    """Return what Ignite's function of this name does, with a global batch size that follows a trace.

    The other arguments are those of Ignite; the model may be in DistributedDataParallel, and the loss must be a mean
    over rows.

    Args:
        loader: the loader that `run` will get. Its `batch_size` is the largest number of rows of a microbatch.
        **settings: those of `variable_batch`; `check_loss`, whether updates 0, 1, 10, 100 and 1,000 warn of a loss
            that is no mean over rows.
    """
    checked_settings = Settings.of(settings)
    wrapped = checked_settings.wrap_optimizer(optimizer, sampler_for(loader, checked_settings), model=model)
    broadcast_parameters(model, wrapped.backend)
    check = LossCheck(checked_settings.check_loss)

    def forward(model: nn.Module, batch: Any) -> tuple[Any, Any, Any, Tensor]:
        """Compute inputs, targets, predictions and the loss of a batch."""
        x, y = prepare_batch(batch, device=device, non_blocking=non_blocking)
        y_pred = model_transform(model_fn(model, x))
        return x, y, y_pred, loss_fn(y_pred, y)

    def step(_: Engine, batch: Any) -> Any:
        """Train on one microbatch: the process function of the engine."""
        if check.takes(wrapped):
            loss_of: Any = lambda model, rows, _: forward(model, rows)[-1]  # noqa: E731
            check(wrapped, loader, model, loss_of, reduction=wrapped.reduction, owner=loss_fn, remedy=_REMEDY)
        model.train()
        x, y, y_pred, loss = forward(model, batch)
        wrapped.backward(loss)
        wrapped.step()
        return output_transform(x, y, y_pred, loss)

    return VariableBatchEngine(step, wrapped)


def variable_batch(optimizer: Optimizer, loader: DataLoader[Any], **settings: Any) -> CustomOptimizer:
    """Return the optimizer for a `VariableBatchEngine`, to be stepped after each microbatch.

    `settings` are `trace` and `sampler_options`, see `CustomSampler`; `rule`, `ref_batchsize` and `optimizer_options`,
    see `CustomOptimizer`, whose errors it raises. The loss is not checked, which a line of the log says. With
    DistributedDataParallel, `optimizer_options={"model": model}`.
    """
    checked_settings = Settings.of(settings)
    wrapped = checked_settings.wrap_optimizer(optimizer, sampler_for(loader, checked_settings))
    LossCheck(checked_settings.check_loss).leave(wrapped, "the step is not Ignite's own")
    return wrapped


class VariableBatchEngine(Engine):
    """An Engine whose iterations are updates; a second `run` continues: `max_epochs` counts all epochs.

    Its output has the structure of that of `step`: a number or 0-D tensor, which should be a mean over the rows of a
    microbatch, becomes the mean over the samples of the update, of all ranks; rows of larger tensors are put together,
    those of this rank; of anything else the last one is taken. The state includes the position in the training.

    Args:
        step: the process function for a microbatch. It calls `optimizer.step()`.
        optimizer: the optimizer, such as `variable_batch` returns.
    """

    def __init__(self, step: Callable[[Engine, Any], Any], optimizer: CustomOptimizer) -> None:
        """Add the handlers that keep Ignite's counters at the position in the training."""
        super().__init__(self._make_update)
        self.optimizer, self._step = optimizer, step
        self._epoch_end_handler: Any = None
        self.add_event_handler(Events.STARTED, self._begin_run)
        self.add_event_handler(Events.EPOCH_STARTED, self._start_epoch)
        self.add_event_handler(Events.GET_BATCH_COMPLETED, lambda: setattr(self.state, "batch", [*self.state.batch]))

    def run(self, data: Iterable[Any], max_epochs: int | None = None, max_iters: int | None = None) -> State:
        """Train on the loader until `max_epochs` epochs, or `max_iters` updates (Ignite 0.5.5), are made."""
        sampler = self.optimizer.sampler
        if not isinstance(sampler, CustomSampler):
            raise type_error("the optimizer must have a vbs.CustomSampler", sampler, "loop over vbs.updates yourself")
        if isinstance(data, DataLoader):
            data = Updates(with_sampler(data, sampler), self.optimizer)
        limits = {} if max_iters is None else {"max_iters": max_iters}
        return self.state if self.optimizer.done else super().run(data, max_epochs, **limits)

    def state_dict(self) -> Any:
        """Return the state of the engine, with the position in the training under "vbs"."""
        length = max(1, self._epoch.updates)  # of a whole epoch, which Ignite demands
        return {**super().state_dict(), "epoch_length": length, "vbs": self.optimizer.state_dict()["vbs"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of the engine and the position in the training, on any number of ranks."""
        optimizer = self.optimizer
        state = {name: state_dict[name] for name in state_dict if name != "iteration"}
        optimizer.load_state_dict({**optimizer.inner.state_dict(), "vbs": state.pop("vbs", None)})
        super().load_state_dict({**state, "epoch": optimizer.epoch, "epoch_length": 1})  # not iteration // epoch_length
        self.state.iteration, self.state.epoch_length = optimizer.updates, None

    @property
    def _epoch(self) -> Epoch:
        """The epoch of the last update."""
        sampler = self.optimizer.sampler
        return sampler.batches.epoch(sampler.position)

    def _make_update(self, _: Engine, update: Sequence[Any]) -> Any:
        """Train on the microbatches of an update, and return its output: the mean, or all rows, of their outputs.

        Ignite calls it as the process function, once an update.

        Args:
            update: the microbatches of this rank.
        """
        parts = ((self.optimizer.microbatch, batch) for batch in update)  # each is that of the step that follows
        outputs = [(part.samples / part.batch_size, self._step(self, batch)) for part, batch in parts]
        self.state.epoch_length = self._epoch.updates  # an estimate, if a controller decides
        weights, (first_output, *other_outputs) = zip(*outputs, strict=True)
        return tree_map(lambda *parts: self._mean_leaf(weights, parts), first_output, *other_outputs)

    def _mean_leaf(self, weights: Sequence[float], outputs: Sequence[Any]) -> Any:
        """Return the output of an update, from the outputs of its microbatches.

        Args:
            weights: the share of the update's samples that each microbatch of this rank has; 0 for replays.
            outputs: an output of each microbatch: numbers or 0-D tensors are averaged, rows are put together.
        """
        first, weighted = outputs[0], [pair for pair in zip(weights, outputs, strict=True) if pair[0]]
        if isinstance(first, Tensor) and first.dim():
            return torch.cat([output for _, output in weighted]) if weighted else []  # metrics of Ignite ignore a []
        if not isinstance(first, (Tensor, Real)):
            return outputs[-1]
        mean = torch.as_tensor(sum(weight * output for weight, output in weighted), dtype=torch.float64)
        mean = mean.to(self.optimizer.backend.device)
        self.optimizer.backend.all_reduce_sum([mean])  # the shares of all ranks add up to 1
        return mean.to(first.device, torch.result_type(first, 1.0)) if isinstance(first, Tensor) else mean.item()

    def _begin_run(self) -> None:
        """Set Ignite's counters of updates and epochs to the position in the training, as a run begins or resumes.

        Ignite would compute them from the length of the first epoch, but epochs have unequal lengths.
        """
        state, optimizer = self.state, self.optimizer
        if optimizer.sampler.training.end_pending:  # restored at the end of an epoch, whose handlers are not run again
            deque(state.dataloader, maxlen=0)  # reads the rest of the epoch, which has no update
        state.iteration, state.epoch, state.epoch_length = optimizer.updates, optimizer.epoch, None

    def _start_epoch(self) -> None:
        """Set Ignite's counters to the epoch that begins; let `_end_epoch` run after the user's handlers at its end."""
        optimizer, state = self.optimizer, self.state
        epoch = optimizer.sampler.plan.epoch(optimizer.epoch)
        state.iteration = optimizer.updates
        state.epoch = optimizer.epoch + 1
        state.epoch_length = epoch.updates
        # Private: how many updates of the epoch were made before a restore. Ignite takes iteration % epoch_length.
        self._init_iter = optimizer.updates - epoch.first_step
        self._updates_at_start = optimizer.updates
        if self._epoch_end_handler is not None:
            self._epoch_end_handler.remove()
        self._epoch_end_handler = self.add_event_handler(Events.EPOCH_COMPLETED, self._end_epoch)

    def _end_epoch(self) -> None:
        """Terminate the run if the training has ended, or the epoch made no update."""
        self.state.epoch_length = None  # otherwise Ignite takes epoch_length * max_epochs for the end
        ends = self.optimizer.done and (self.state.max_epochs is None or self.state.epoch < self.state.max_epochs)
        stuck = self.optimizer.updates == self._updates_at_start  # a handler hides an exception, which would follow
        if ends or stuck:
            self.terminate()
