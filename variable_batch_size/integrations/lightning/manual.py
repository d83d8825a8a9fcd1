"""With manual optimization `training_step` runs for each microbatch, but Lightning counts and schedules updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.strategies import Strategy
from torch import Tensor

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


@final
class BackwardsFirst:
    """Checks that in each `training_step` all backwards run before the first `step()`.

    A step changes the weights only after the last microbatch of an update. A backward after it would see the old
    weights in all microbatches but the last one, so that the update would depend on their size and number. Those by
    `manual_backward` are seen when they begin, others by the gradients of an optimizer that steps later.
    """

    def __init__(self) -> None:
        self._stepped: CustomOptimizer | None = None  # the first one in the microbatch
        self._left: list[tuple[Tensor, Tensor, int]] = []  # parameters, their gradients then, and versions of these

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Watch a `training_step` within a block."""
        try:
            yield
        finally:
            self._stepped, self._left = None, []

    def check_backward(self) -> None:
        """Check that no optimizer has stepped in this microbatch.

        Raises:
            RuntimeError: if one has.
        """
        if self._stepped is not None:
            raise RuntimeError(
                f"all backwards of a training_step must run before its first step(), because a step changes the "
                f"weights only after the last microbatch of an update, but one ran after step() of the optimizer "
                f"{type(self._stepped.inner).__name__}; call manual_backward() for every loss first, each between "
                f"toggle_optimizer() and untoggle_optimizer() if it must reach no other parameters, and step() of all "
                f"optimizers after that"
            )

    def check_gradients(self, optimizer: CustomOptimizer) -> None:
        """Check that an optimizer that steps now has the gradients that it had at the first step.

        Raises:
            RuntimeError: if a backward has changed them.
        """
        left = {id(parameter): (gradient, version) for parameter, gradient, version in self._left}
        for parameter in _parameters(optimizer) if self._stepped is not None else ():
            gradient, (before, version) = parameter.grad, left.get(id(parameter), (None, 0))
            if gradient is not None and (gradient is not before or gradient._version != version):
                self.check_backward()

    def note_step(self, optimizer: CustomOptimizer, others: Sequence[CustomOptimizer]) -> None:
        """Note that an optimizer has stepped, and the gradients of the others."""
        if self._stepped is None:
            self._stepped = optimizer
            parameters = (each for other in others if other is not optimizer for each in _parameters(other))
            self._left = [(each, each.grad, each.grad._version) for each in parameters if each.grad is not None]


def _parameters(optimizer: CustomOptimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


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
