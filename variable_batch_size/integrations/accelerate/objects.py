"""The loader, the optimizer and the scheduler that `prepare` returns: those of Accelerate, by update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import send_to_device
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from variable_batch_size.data.microbatching import Microbatch
from variable_batch_size.optim.optimizer import CustomOptimizer


class VariableBatchLoader(DataLoaderStateMixin):
    """The loader of the training: it yields the microbatches of this process that are left of the epoch.

    Each iteration sets the epoch of the next update, and each microbatch `accelerator.sync_gradients`.

    Args:
        loader: the loader that reads the sampler of `optimizer`.
        optimizer: the optimizer.
        accelerator: the accelerator, whose device the microbatches are moved to.

    Attributes:
        under_way: whether a loop over it has begun and not ended.
    """

    def __init__(self, loader: DataLoader[Any], optimizer: CustomOptimizer, accelerator: Accelerator) -> None:
        self.loader, self._optimizer, self._accelerator = loader, optimizer, accelerator
        self.gradient_state = accelerator.gradient_state
        self.under_way = False
        self._begun = optimizer.sampler.clock.position  # where the iteration under way has begun

    def __len__(self) -> int:
        """Return how many microbatches the iteration under way, or the next one, yields in this process."""
        sampler = self._optimizer.sampler
        number, step = self._begun if self.under_way else (self._optimizer.epoch, sampler.clock.step)
        try:
            return sampler.plan.count(sampler.plan.epoch(number), step, sampler.world)
        except ValueError:  # the trace has ended before that epoch
            return 0

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the epoch; a step that an earlier loop has left incomplete starts over."""
        accelerator, optimizer = self._accelerator, self._optimizer
        self.set_epoch(epoch := optimizer.epoch)
        if hasattr(self.loader.dataset, "set_epoch"):
            self.loader.dataset.set_epoch(epoch)
        self.begin()
        self.under_way, self._begun = True, optimizer.sampler.clock.position
        microbatch = None
        try:
            for batch in self.loader:
                if microbatch is optimizer.microbatch:
                    raise _unstepped(microbatch)
                microbatch = optimizer.microbatch
                accelerator.sync_gradients = microbatch.ends_step
                end = optimizer.sampler.plan.epoch(epoch).end_step  # of a trace that grows, as far as it is known
                self.end_of_dataloader = microbatch.ends_step and microbatch.step + 1 == end
                yield self._on_device(batch)
            if microbatch is not None and microbatch.step == optimizer.updates:
                raise _unstepped(microbatch)
        finally:
            self.under_way = False
            accelerator.sync_gradients = True
            self.end()

    def set_epoch(self, epoch: int) -> None:
        """Move to a later epoch; each iteration does it by itself."""
        self._optimizer.sampler.set_epoch(epoch)
        self._optimizer.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader, but for its batch sampler: another loader would read the training's."""
        if name == "batch_sampler":  # as the function accelerate.skip_first_batches does
            raise AttributeError(
                "the training's microbatches must all come from its own loader, but its batch_sampler was asked for; "
                "iterate the loader itself, which continues with the next update after load_state(), and take "
                "optimizer.sampler for anything else"
            )
        if name == "loader":  # there is none yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _on_device(self, batch: Any) -> Any:
        accelerator = self._accelerator
        if not accelerator.device_placement:
            return batch
        return send_to_device(batch, accelerator.device, non_blocking=accelerator.non_blocking)


def _unstepped(microbatch: Microbatch) -> RuntimeError:
    return RuntimeError(
        f"every microbatch of the loader must reach optimizer.step(), but one of update {microbatch.step} did not; "
        f"call optimizer.step() after each accelerator.backward(), whatever accelerator.sync_gradients is, and "
        f"evaluate with another loader"
    )


class VariableBatchOptimizer(AcceleratedOptimizer):
    """The optimizer of the training, to be stepped after each microbatch; `optimizer` is the `CustomOptimizer`.

    It has the attributes and methods of the `CustomOptimizer`, too.

    Args:
        optimizer: the wrapper around the user's optimizer.
        scaler: the accelerator's GradScaler, if it has one.
    """

    _is_accelerate_prepared = True  # Accelerate's own mark: prepare_optimizer() registers it and does not wrap it

    def __init__(self, optimizer: CustomOptimizer, scaler: Any = None) -> None:
        super().__init__(optimizer, device_placement=False)  # else it loads the state, and with it a position
        self.scaler = scaler
        for register in (name for name in dir(Optimizer) if name.startswith("register_")):
            setattr(self, register, getattr(optimizer, register))

    def step(self, closure: Callable[[], object] | None = None) -> bool:
        """Count one microbatch; after the last one of an update, update the weights.

        Returns:
            Whether the weights changed, see `CustomOptimizer.step`.

        Raises:
            RuntimeError: if nothing was read from the loader of the training; or as `CustomOptimizer.step` does.
        """
        optimizer = self.optimizer
        ends = optimizer.microbatch.ends_step
        if optimizer.sampler.iteration is None:
            raise RuntimeError(
                "optimizer.step() must follow a microbatch of the loader that prepare() has returned, but nothing was "
                "read from that loader; iterate it, and not the one that was passed to prepare()"
            )
        if self.scaler is None:
            updated = optimizer.step(closure)
        else:
            updated = bool(self.scaler.step(optimizer, *([] if closure is None else [closure])))
            self.scaler.update()
            updated = updated and optimizer.lr_factor() != 0  # which is 0 if a device has found an overflow
        self._is_overflow = ends and not updated
        return updated

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients that have come since the last `step()`; what it has accumulated stays."""
        self.optimizer.zero_grad(set_to_none is not False)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the `CustomOptimizer`."""
        if name == "optimizer":  # there is none yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class VariableBatchScheduler(AcceleratedScheduler):
    """A scheduler of torch whose `step()` in the loop counts once per update, on any number of processes."""

    _is_accelerate_prepared = True  # Accelerate's own mark: prepare_scheduler() registers it and does not wrap it

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, if this was the last microbatch of an update that changed the weights.

        With `step_scheduler_with_optimizer=False` of the Accelerator, at any call.
        """
        made = self.gradient_state.sync_gradients and not any(one.step_was_skipped for one in self.optimizers)
        if made or not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
