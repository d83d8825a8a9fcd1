"""A learning-rate schedule of torch, read at the reference updates that a training has passed.

The life of an update here: the optimizer has committed it, `step()` notices that by its number, takes a snapshot of
what it cannot read at once, measures how far the training is, and steps the schedule up to there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any, Literal, final, get_args

from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from variable_batch_size._validation import check_number, value_error
from variable_batch_size.optim.optimizer import CustomOptimizer

By = Literal["progress", "samples", "updates"]

DELAY = 2  # updates; by then the progress has come from any device, and nobody waits for it


@final
class ProgressScheduler:
    """Steps a torch scheduler once a reference update, so that it ends where the training ends, whatever the trace did.

    After each update the scheduler has taken floor(min(m, total)) steps since this object was made; fractions of m
    are carried over. m, in reference updates, is

        by="progress":  the sum of the updates' gains, optimizer.progress, as it stood 2 updates (`DELAY`) ago
        by="samples":   optimizer.samples / ref_batchsize, as an exact fraction
        by="updates":   optimizer.updates

    The delay is the same on every device, so that none waits until the host has read the progress. Call `step()`
    after each update, `if optimizer.step(): scheduler.step()`; a call without a new update does nothing. A
    `OneCycleLR` keeps its last value from its step `total_steps - 1` on, where torch's would rise and then raise.
    AdaScale reads its schedule like this, by progress (Johnson et al. 2020, arXiv 2007.05105, algorithm 1).

    Args:
        scheduler: any `torch.optim.lr_scheduler` of the wrapper or of its inner optimizer that steps on a count;
            made for the beginning of the training, and stepped by nobody else.
        optimizer: the wrapper, whose updates are counted.
        by: what is counted.
        total: the length of the training, in reference updates; there the schedule stops, and `done` turns True.

    Raises:
        TypeError, ValueError: where the arguments do not fit together; the text says what to do.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizer: CustomOptimizer,
        by: By = "progress",
        *,
        total: float | None = None,
    ) -> None:
        if not isinstance(optimizer, CustomOptimizer):
            raise TypeError(
                f"the optimizer must be the vbs.CustomOptimizer whose updates are counted, got "
                f"{type(optimizer).__name__}; pass the wrapper"
            )
        self._scheduler = _checked(scheduler, optimizer)
        if by not in get_args(By):
            raise value_error('by must be "progress", "samples" or "updates"', repr(by), "pass one of them")
        if by == "samples" and optimizer.ref_batchsize is None:
            raise value_error(
                'by="samples" needs an optimizer with a ref_batchsize, the samples of a reference update',
                "one without",
                'give the optimizer its ref_batchsize, or pass by="updates"',
            )
        self._cycles = [part for part in _parts(scheduler) if isinstance(part, OneCycleLR)]
        self._optimizer, self._by, self._total = optimizer, by, _checked_total(total)
        self._steps = 0  # that the scheduler has taken
        self._updates = optimizer.updates  # at the last call
        self._progress = optimizer.progress_later()()  # as the schedule reads it
        self._pending: deque[tuple[int, Callable[[], float]]] = deque()  # (updates, the progress after them)

    def step(self) -> None:
        """Step the scheduler up to where the training is; without a new update, do nothing."""
        updates = self._optimizer.updates
        if updates == self._updates:
            return
        self._updates = updates
        if self._by == "progress":
            self._follow_progress(updates)
        for _ in range(self._steps, math.floor(min(self._measure(), self._total))):
            for cycle in self._cycles:  # torch's would go beyond its end, so one that is there takes its last step anew
                cycle.last_epoch = min(cycle.last_epoch, cycle.total_steps - 2)
            self._scheduler.step()
            self._steps += 1

    @property
    def passed(self) -> float:
        """The reference updates that the training has passed, as the schedule reads them: m in the equation."""
        return float(self._measure())

    @property
    def done(self) -> bool:
        """Whether the schedule reads that the training has passed `total` reference updates."""
        return self._measure() >= self._total

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group that the scheduler has set last."""
        return self._scheduler.get_last_lr()

    # State. ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state, and where it stands in the training, as plain numbers for every world."""
        return {
            "by": self._by,
            "steps": self._steps,
            "updates": self._updates,
            "progress": self._progress,
            "pending": [[updates, progress()] for updates, progress in self._pending],
            "scheduler": self._scheduler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict()` gave; the optimizer's own state is loaded beside it, before or after.

        Raises:
            ValueError: when the state counts something else; then nothing has changed.
        """
        found = state_dict.get("by")
        if found != self._by:
            raise value_error(
                f"the state of a schedule must count what goes on here, by={self._by!r}",
                f"by={found!r}",
                "make this ProgressScheduler with the by that its state was saved with",
            )
        self._scheduler.load_state_dict(state_dict["scheduler"])
        self._steps, self._updates = state_dict["steps"], state_dict["updates"]
        self._progress = state_dict["progress"]
        self._pending = deque((updates, partial(float, progress)) for updates, progress in state_dict["pending"])

    # The measure. ------------------------------------------------------------------------------------------------

    def _follow_progress(self, updates: int) -> None:
        """Read the progress of `DELAY` updates ago, and what a jump back of the clock has left; note today's."""
        while self._pending and not updates - DELAY < self._pending[0][0] < updates:
            self._progress = self._pending.popleft()[1]()
        self._pending.append((updates, self._optimizer.progress_later()))

    def _measure(self) -> Fraction | float:
        if self._by == "progress":
            return self._progress
        if self._by == "updates":
            return self._optimizer.updates
        return Fraction(self._optimizer.samples, self._optimizer.ref_batchsize)


def _checked(scheduler: LRScheduler, optimizer: CustomOptimizer) -> LRScheduler:
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"the scheduler must be one of torch.optim.lr_scheduler, got {type(scheduler).__name__}; make one for this "
            f"optimizer"
        )
    if any(isinstance(part, ReduceLROnPlateau) for part in _parts(scheduler)):
        raise TypeError(
            "the scheduler must step on a count, but ReduceLROnPlateau steps on a metric; call its own step(metric) "
            "where the metric is known instead"
        )
    if scheduler.optimizer not in (optimizer, optimizer.inner):
        raise ValueError(
            f"the scheduler must belong to the wrapper that is passed or to its inner optimizer, but this "
            f"{type(scheduler).__name__} belongs to another {type(scheduler.optimizer).__name__}; make it for this one"
        )
    return scheduler


def _checked_total(total: object) -> float:
    """The last reference update: infinity where there is none."""
    if total is None:
        return math.inf
    remedy = "pass the length of the training in reference updates, or leave it out"
    number = check_number(total, "total", remedy)
    if number == 0:
        raise value_error("total must be a finite number > 0", number, remedy)
    return number


def _parts(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """A scheduler and all that it is made of."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)
