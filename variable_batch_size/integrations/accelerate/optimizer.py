"""The optimizer and the schedulers of a training that `prepare` returns: those of Accelerate, by update.

All private names of Accelerate are here: its mark of prepared objects, without which it would wrap ours once more, and
`_is_overflow`, by which it tells its schedulers of a skipped step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size.integrations.schedules import warn_of_batches
from variable_batch_size.optim.optimizer import CustomOptimizer


def is_prepared(one: object) -> bool:
    """Return whether Accelerate has prepared an object, by the mark that it sets."""
    return getattr(one, "_is_accelerate_prepared", False)


@final
class VariableBatchOptimizer(AcceleratedOptimizer):
    """The optimizer of the training, to be stepped after each microbatch; `optimizer` is the `CustomOptimizer`.

    It has the attributes and methods of the `CustomOptimizer`, too.

    Args:
        optimizer: the wrapper around the user's optimizer.
        scaler: the accelerator's GradScaler, if it has one.
        batches: number of batches of the user's loader in an epoch.
    """

    _is_accelerate_prepared = True  # Accelerate's own mark: prepare_optimizer() registers it and does not wrap it

    def __init__(self, optimizer: CustomOptimizer, scaler: Any, batches: int) -> None:
        super().__init__(optimizer, device_placement=False)  # else it loads the state, and with it a position
        self.scaler, self._batches = scaler, batches
        self.schedulers: list[tuple[Any, int]] = []  # each with its steps per update
        self.updated = False  # whether the last step() has changed the weights
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
        if optimizer.sampler.iteration is None:
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
        for scheduler, steps in self.schedulers if ends else ():
            warn_of_batches([scheduler], optimizer.sampler.plan, self._batches, steps_per_update=steps)
        self.schedulers, self.updated = [] if ends else self.schedulers, updated
        return updated

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients that have come since the last `step()`; what it has accumulated stays."""
        self.optimizer.zero_grad(set_to_none is not False)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the `CustomOptimizer`."""
        if name == "optimizer":  # there is none yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)


@final
class VariableBatchScheduler(AcceleratedScheduler):
    """A scheduler of torch whose `step()` in the loop counts by update, as many times as `steps_per_update` says."""

    _is_accelerate_prepared = True  # Accelerate's own mark: prepare_scheduler() registers it and does not wrap it

    def __init__(
        self, scheduler: Any, optimizer: VariableBatchOptimizer, steps_per_update: int, step_with_optimizer: bool
    ) -> None:
        super().__init__(scheduler, optimizer, step_with_optimizer)
        self._steps = steps_per_update
        optimizer.schedulers.append((scheduler, steps_per_update))

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step after an update; with `step_scheduler_with_optimizer=False` of the Accelerator, at any call.

        Not by `sync_gradients`, which all Accelerators of a process share.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif self.optimizers[0].updated:
            for number in range(self._steps):
                # As Accelerate does: otherwise OneCycleLR raises within an update that only begins before its end.
                if number == 0 or self.scheduler.last_epoch + 1 < getattr(self.scheduler, "total_steps", float("inf")):
                    self.scheduler.step(*args, **kwargs)


@final
class Position:
    """The position in a training whose optimizer Accelerate saves by itself, as under FSDP2."""

    def __init__(self, optimizer: CustomOptimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the noise; every rank has to call it."""
        return {"vbs": self._optimizer.state_dict()["vbs"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Move the optimizer, whose own state was restored, to the position."""
        optimizer = self._optimizer
        optimizer.load_state_dict({**optimizer.inner.state_dict(), "vbs": state_dict["vbs"]})
