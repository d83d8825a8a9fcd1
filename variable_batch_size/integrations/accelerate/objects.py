"""The loader, the optimizer and the scheduler that `prepare` returns: those of Accelerate, by update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import send_to_device
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from variable_batch_size._validation import value_error
from variable_batch_size.microbatching import Microbatch
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
        self._loop: object = None  # that iteration, or the last one
        self._ended: int | None = None  # what it has yielded, if its epoch is over and no other one has begun

    def __len__(self) -> int:
        """Return how many microbatches an iteration yields in this process.

        That is the one under way; after one that has reached the end of its epoch, that one, until the next begins or
        a state is loaded; otherwise the next one.
        """
        sampler = self._optimizer.sampler
        if self._ended is not None and not sampler.clock.just_loaded:
            return self._ended
        number, step = self._begun if self.under_way else (self._optimizer.epoch, sampler.clock.step)
        try:
            return sampler.plan.count(sampler.plan.epoch(number), step, sampler.world, sampler.dealing)
        except ValueError:  # the trace has ended before that epoch
            return 0

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the epoch; a step that an earlier loop has left incomplete starts over."""
        self._ended = None
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        accelerator, optimizer = self._accelerator, self._optimizer
        self.set_epoch(epoch := optimizer.epoch)
        if hasattr(self.loader.dataset, "set_epoch"):
            self.loader.dataset.set_epoch(epoch)
        self.begin()
        self.under_way, self._begun = True, optimizer.sampler.clock.position
        self._loop = loop = object()
        microbatch, yielded = None, 0
        try:
            for batch in self.loader:
                if microbatch is optimizer.microbatch:
                    raise _unstepped(microbatch)
                microbatch = optimizer.microbatch
                accelerator.sync_gradients = microbatch.ends_step
                end = optimizer.sampler.plan.epoch(epoch).end_step  # of a trace that grows, as far as it is known
                self.end_of_dataloader = microbatch.ends_step and microbatch.step + 1 == end
                yielded += 1
                yield self._on_device(batch)
                if self._loop is not loop:
                    raise _interrupted()
            if microbatch is not None and microbatch.step == optimizer.updates:
                raise _unstepped(microbatch)
        finally:
            if self._loop is loop:
                self.under_way = False
                self._ended = yielded if optimizer.sampler.clock.finished else None
                accelerator.sync_gradients = True
                self.end()

    def set_epoch(self, epoch: int) -> None:
        """Move to a later epoch; each iteration does it by itself."""
        self._ended = None
        self._optimizer.sampler.set_epoch(epoch)
        self._optimizer.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader, but for those that are not what a loop of Accelerate takes them for.

        Another loader with its batch sampler would read the training's microbatches.
        """
        if name == "batch_sampler":  # as the function accelerate.skip_first_batches does
            raise AttributeError(
                "the training's microbatches must all come from its own loader, but its batch_sampler was asked for; "
                "iterate the loader itself, which continues with the next update after load_state(), and take "
                "optimizer.sampler for anything else"
            )
        if name in ("batch_size", "total_batch_size"):
            raise AttributeError(
                f"the training's loader has no {name}, because batch sizes change; take optimizer.microbatch before "
                f"optimizer.step(): its rows are those of this process, its batch_size that of the whole update"
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
        f"every microbatch of the loader must reach optimizer.step() before the next one is read, but one of update "
        f"{microbatch.step} did not; read one, call accelerator.backward() and optimizer.step(), whatever "
        f"accelerator.sync_gradients is, and only then read another; evaluate with another loader"
    )


def _interrupted() -> RuntimeError:
    return RuntimeError(
        "a loop over the training's loader must end before another one begins, but another one has begun within it, as "
        "next(iter(loader)) does; look at samples with another DataLoader, which prepare() did not get as its first"
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

    def step(self, closure: Callable[[], object] | None = None, *, count: Tensor | float | None = None) -> bool:
        """Count one microbatch; after the last one of an update, update the weights.

        Args:
            closure: runs forward and `backward()` of the microbatch.
            count: what its loss is a sum over, if not its samples, such as its tokens; see `CustomOptimizer.step`.

        Returns:
            Whether the weights changed, see `CustomOptimizer.step`.

        Raises:
            RuntimeError: if nothing was read from the loader of the training; or as `CustomOptimizer.step` does.
        """
        optimizer = self.optimizer
        ends = optimizer.microbatch.ends_step
        if optimizer.sampler._feed.reading is None:
            raise RuntimeError(
                "optimizer.step() must follow a microbatch of the loader that prepare() has returned, but nothing was "
                "read from that loader, which is the first DataLoader that prepare() got; iterate it, and not the one "
                "that was passed, and pass loaders of evaluations after it"
            )
        if self.scaler is None:
            updated = optimizer.step(closure, count=count)
        else:
            given = {"closure": closure, "count": count}
            given = {name: value for name, value in given.items() if value is not None}
            updated = bool(self.scaler.step(optimizer, **given))
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
    """A scheduler of torch whose `step()` in the loop counts by update.

    Args:
        scheduler: the scheduler.
        optimizer: the optimizer of the training.
        steps_per_update: how many steps it makes per update. A number other than 1 is in the state.
        step_with_optimizer: as for Accelerate's: False if it steps at any call.
    """

    _is_accelerate_prepared = True  # Accelerate's own mark: prepare_scheduler() registers it and does not wrap it

    def __init__(
        self, scheduler: Any, optimizer: VariableBatchOptimizer, steps_per_update: int, step_with_optimizer: bool
    ) -> None:
        super().__init__(scheduler, optimizer, step_with_optimizer)
        self._steps = steps_per_update

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, if this was the last microbatch of an update that changed the weights.

        With `step_scheduler_with_optimizer=False` of the Accelerator, at any call.
        """
        made = self.gradient_state.sync_gradients and not any(one.step_was_skipped for one in self.optimizers)
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif made:
            for number in range(self._steps):
                # As Accelerate does: otherwise OneCycleLR raises within an update that only begins before its end.
                if number and self.scheduler._step_count > getattr(self.scheduler, "total_steps", float("inf")):
                    break
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler, with "steps_per_update" if that is not 1."""
        own = {} if self._steps == 1 else {"steps_per_update": self._steps}
        return {**self.scheduler.state_dict(), **own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            ValueError: if its scheduler made another number of steps per update.
        """
        state = dict(state_dict)
        if (saved := state.pop("steps_per_update", 1)) != self._steps:
            requirement = f"the schedule must count as it was saved, with {saved} steps per update"
            raise value_error(requirement, self._steps, f"pass steps_per_update={saved} to prepare()")
        self.scheduler.load_state_dict(state)
