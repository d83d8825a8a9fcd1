"""A learning-rate schedule of torch that steps once for each reference update of the training.

The life of an update here: the optimizer commits it; `step()` notices that `optimizer.updates` has changed, keeps the
new progress to read it later, measures how far the training is, and steps the schedule up to there.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Literal, final, get_args
from weakref import WeakSet

from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import check_number, suggests, value_error
from variable_batch_size.optim.optimizer import CustomOptimizer

By = Literal["progress", "samples", "updates"]

_stepped: WeakSet[LRScheduler] = WeakSet()  # by a ProgressScheduler

DELAY = 2  # updates; after that many, any device has computed the progress and reading it does not wait


def is_stepped_by_progress(scheduler: object) -> bool:
    """Return whether a `ProgressScheduler` steps this scheduler."""
    return isinstance(scheduler, LRScheduler) and scheduler in _stepped


@final
class ProgressScheduler:
    """Steps a torch scheduler once for each reference update, so that it ends with the training, whatever the trace.

    After each update the scheduler has taken floor(min(m, total)) steps since this object was created; fractions of m
    carry over. m, in reference updates, is

        by="progress":  optimizer.progress, the sum of `Scaling.progress`, as of 2 updates (`DELAY`) ago
        by="samples":   optimizer.samples / ref_batchsize, an exact fraction
        by="updates":   optimizer.updates

    The delay is the same on every device, so that no device waits for the host to read the progress. Call `step()`
    after each update, `if optimizer.step(): scheduler.step()`; a call without a new update does nothing. A
    `OneCycleLR` keeps its last value from its step `total_steps - 1` on; in torch it would rise again and then raise.
    AdaScale reads its schedule by progress (Johnson et al. 2020, arXiv 2007.05105, algorithm 1).

    Args:
        scheduler: any scheduler of `torch.optim.lr_scheduler` that steps on a count, created for the wrapper or its
            inner optimizer at the beginning of the training. Do not call its `step()`.
        optimizer: the wrapper whose updates are counted.
        by: what is counted.
        total: length of the training, in reference updates. From there on the schedule holds its last value, and `done`
            is True. Without it, a scheduler continues as in torch: a `CosineAnnealingLR` rises again after `T_max`.

    Raises:
        TypeError: if `scheduler` is not an LRScheduler or contains a ReduceLROnPlateau, `optimizer` is not a
            CustomOptimizer, or `total` is not a number.
        ValueError: if `scheduler` belongs to another optimizer, `by` is unknown, by="samples" and the optimizer has no
            ref_batchsize, or `total` is not finite and > 0.
    """

    @suggests
    def __init__(
        self, scheduler: LRScheduler, optimizer: CustomOptimizer, by: By = "progress", *, total: float | None = None
    ) -> None:
        if not isinstance(optimizer, CustomOptimizer):
            raise TypeError(
                f"the optimizer must be the vbs.CustomOptimizer whose updates are counted, got "
                f"{type(optimizer).__name__}; pass a torch scheduler and then the wrapper"
            )
        self._scheduler = _check_scheduler(scheduler, optimizer)
        if by not in get_args(By):
            raise value_error('by must be "progress", "samples" or "updates"', repr(by), "pass one of them")
        if by == "samples" and optimizer.ref_batchsize is None:
            raise value_error(
                'by="samples" needs an optimizer with a ref_batchsize, the samples of a reference update',
                "one without",
                'give the optimizer its ref_batchsize, or pass by="updates"',
            )
        _stepped.add(scheduler)
        self._one_cycles = [part for part in _nested_schedulers(scheduler) if isinstance(part, OneCycleLR)]
        self._optimizer = optimizer
        self._by = by
        self._total = _check_total(total)
        self._steps = 0  # number of steps of the scheduler
        self._updates = optimizer.updates  # at the last call of `step`
        self._progress = optimizer._progress_reader()()  # as the schedule reads it, `DELAY` updates ago
        self._pending: deque[tuple[int, Callable[[], float]]] = deque()  # (updates, function that reads the progress)

    def step(self) -> None:
        """Step the torch scheduler once for each reference update since the last call, none or several."""
        updates = self._optimizer.updates
        if updates == self._updates:
            return
        self._updates = updates
        if self._by == "progress":
            self._read_delayed_progress(updates)
        due_steps = math.floor(min(self._reference_updates(), self._total))
        for _ in range(self._steps, due_steps):
            for one_cycle in self._one_cycles:  # torch raises beyond its end: repeat the last step
                one_cycle.last_epoch = min(one_cycle.last_epoch, one_cycle.total_steps - 2)
            self._scheduler.step()
            self._steps += 1

    @property
    def passed(self) -> float:
        """The number of reference updates of the training so far, as the schedule reads it: m in the equation."""
        return float(self._reference_updates())

    @property
    def done(self) -> bool:
        """Whether the training has passed `total` reference updates, as the schedule reads them.

        From then on the schedule holds its last value.
        """
        return self._reference_updates() >= self._total

    def check_ends(self, optimizers: Sequence[CustomOptimizer]) -> None:
        """Raise ValueError unless the schedule counts one of these optimizers and has a `total`: else it never ends."""
        if self._optimizer not in optimizers:
            raise value_error(
                "the schedule must belong to an optimizer of this loop",
                f"one of another {type(self._optimizer).__name__}",
                "create the ProgressScheduler with this optimizer",
            )
        if self._total == math.inf:
            raise value_error(
                "the schedule must have an end", "a ProgressScheduler without total=", "create it with total="
            )

    def get_last_lr(self) -> list[float]:
        """Return the last learning rate that the scheduler has set, of each parameter group."""
        return self._scheduler.get_last_lr()

    # State. ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler and its position in the training, as plain numbers that fit every world.

        A UserWarning says so if `step()` was not called after the last update, as if a save came before it: a run that
        resumes from there makes its next update with an earlier learning rate.
        """
        optimizer = self._optimizer
        was_made = optimizer.last_batch is not None and optimizer._updated  # here, and not skipped: `step()` was True
        if self._updates != optimizer.updates and was_made:
            warnings.warn(
                f"scheduler.step() was not called after update {optimizer.updates}, so that a resumed run would "
                f"make its next update with an earlier learning rate; call scheduler.step() before you save",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )
        return {
            "by": self._by,
            "steps": self._steps,
            "updates": self._updates,
            "progress": self._progress,
            "pending": [[updates, read_progress()] for updates, read_progress in self._pending],
            "scheduler": self._scheduler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state. Also load the state of the optimizer, before or after.

        Raises:
            ValueError: if the state was saved with a different `by`; the scheduler is then unchanged.
        """
        saved = state_dict.get("by")
        if saved != self._by:
            raise value_error(
                f"the state must come from a ProgressScheduler with by={self._by!r}",
                f"by={saved!r}",
                "create this ProgressScheduler with the by of the saved one",
            )
        self._scheduler.load_state_dict(state_dict["scheduler"])
        self._steps, self._updates = state_dict["steps"], state_dict["updates"]
        self._progress = state_dict["progress"]
        self._pending = deque((updates, partial(float, progress)) for updates, progress in state_dict["pending"])

    # The measure. ------------------------------------------------------------------------------------------------

    def _read_delayed_progress(self, updates: int) -> None:
        """Read the progress of `DELAY` updates ago, and keep a reader of the present one for later.

        Reading the present one would make the host wait for the device. If `updates` has gone back since the last call,
        read all that is pending.
        """
        while self._pending:  # the oldest first
            updates_then, read_progress = self._pending[0]
            if updates - DELAY < updates_then < updates:  # not `DELAY` updates old yet
                break
            self._pending.popleft()
            self._progress = read_progress()
        self._pending.append((updates, self._optimizer._progress_reader()))

    def _reference_updates(self) -> Fraction | float:
        """Return how far the training is, in reference updates; exact if it counts samples."""
        if self._by == "progress":
            return self._progress
        if self._by == "updates":
            return self._optimizer.updates
        return Fraction(self._optimizer.samples, self._optimizer.ref_batchsize)


def _check_scheduler(scheduler: LRScheduler, optimizer: CustomOptimizer) -> LRScheduler:
    """Return the scheduler; raise an error unless it steps on a count and belongs to the optimizer."""
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"the scheduler must be one of torch.optim.lr_scheduler, got {type(scheduler).__name__}; create one for "
            f"this optimizer"
        )
    if any(isinstance(part, ReduceLROnPlateau) for part in _nested_schedulers(scheduler)):
        raise TypeError(
            "the scheduler must step on a count, but ReduceLROnPlateau steps on a metric; call its step(metric) "
            "directly when the metric is known"
        )
    if scheduler.optimizer not in (optimizer, optimizer.inner):
        raise ValueError(
            f"the scheduler must belong to this wrapper or its inner optimizer, but this {type(scheduler).__name__} "
            f"belongs to another {type(scheduler.optimizer).__name__}; create it for this one"
        )
    return scheduler


def _check_total(total: object) -> float:
    """Return `total`, the length of a training in reference updates, as a finite number > 0; infinity for None."""
    if total is None:
        return math.inf
    remedy = (
        "pass the length of the training in reference updates, after which schedules hold their last value, or omit it"
    )
    number = check_number(total, "total", remedy)
    if number == 0:
        raise value_error("total must be a finite number > 0", number, remedy)
    return number


def _nested_schedulers(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield a scheduler, and all schedulers within it, as a SequentialLR or a ChainedScheduler has them."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):  # private: there is no public list
        yield from _nested_schedulers(part)
