"""With manual optimization `training_step` runs for each microbatch, but Lightning counts and schedules updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.strategies import Strategy

from variable_batch_size.optim.optimizer import CustomOptimizer


@final
class OncePerUpdate:
    """A scheduler whose `step()` has an effect only once an update, for a `training_step` that calls it each time.

    Other attributes are those of the scheduler.

    Args:
        scheduler: the scheduler.
        optimizers: the optimizers, of which the step of one is between two updates if that of all is.
    """

    def __init__(self, scheduler: Any, optimizers: Sequence[CustomOptimizer]) -> None:
        self._scheduler, self._optimizers = scheduler, optimizers

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, unless an update is under way: before its first microbatch or after its last one."""
        if not any(optimizer.inside_step for optimizer in self._optimizers):
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


@contextmanager
def counting_one_step(strategy: Strategy, *, last: bool) -> Iterator[None]:
    """Let Lightning count the steps of its optimizers within a block only if it is the `last` microbatch of an update.

    Its manual loop counts in two hooks of each LightningOptimizer, which it sets before each batch.
    """
    optimizers = strategy._lightning_optimizers
    hooks = [(optimizer._on_before_step, optimizer._on_after_step) for optimizer in optimizers]
    if not last:
        for optimizer in optimizers:
            optimizer._on_before_step = optimizer._on_after_step = do_nothing_closure
    try:
        yield
    finally:
        for optimizer, (before, after) in zip(optimizers, hooks, strict=True):
            optimizer._on_before_step, optimizer._on_after_step = before, after
