"""The batches of a training, which the decisions of a controller replace by longer ones, and where loaders wait."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

from variable_batch_size.adaptive.decided_trace import ADOPTED_AFTER, DecidedTrace
from variable_batch_size.data.batches import Batches, Position

WAIT_SECONDS = 0.5  # after which a waiting loader looks whether anybody still reads what it would read
WARN_SECONDS = 30.0  # of waiting


class AbandonedError(Exception):
    """Nobody reads what a waiting loader would read."""


@final
class Growing:
    """The batches of a training, as far as they are known.

    A loader may read in a thread of its own, ahead of the training: where the batch size is not decided yet, it waits
    in `wait_for`. The thread of the training cannot wait for itself and gets an error. Before the first update
    nobody knows which one it is: only a daemon, as the thread of a loader is, waits then.

    Attributes:
        decided_at: number of updates after which the controller was last checked; several optimizers may share a
            sampler.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.decided_at = 0
        self._changed = threading.Condition()
        self._trainer: int | None = None  # the thread of the last update

    def __getstate__(self) -> dict[str, Any]:  # of a copy, which no loader waits for
        batches = self._batches
        if batches.decided is not None:
            batches = replace(batches, decided=batches.decided.copy())
        return {"_batches": batches, "decided_at": self.decided_at}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_batches"])
        self.decided_at = state["decided_at"]

    @property
    def batches(self) -> Batches:
        """The batches."""
        return self._batches

    @batches.setter
    def batches(self, batches: Batches) -> None:
        with self._changed:
            self._batches = batches
            self._changed.notify_all()

    def grow(self, decided: DecidedTrace, position: Position) -> None:
        """Plan with what was decided since; `position`: that of the training, before which nothing changes."""
        self.batches = self._batches.grow(decided, position)

    def mark_trainer(self) -> None:
        """Note that this thread trains."""
        self._trainer = threading.get_ident()

    def wait_for(self, number: int, step: int, ahead: int, *, abandoned: Callable[[], bool] = lambda: False) -> Batches:
        """Return batches in which the size of a step is known, or the epoch is known to have ended before it.

        Args:
            number: number of the epoch.
            step: the step.
            ahead: number of microbatches, or of updates, that were read and not trained on, with this one.
            abandoned: function that returns whether nobody reads what the caller would read.

        Raises:
            RuntimeError: if the thread of the training would have to wait.
            AbandonedError: if nobody reads what the caller would read.
        """
        begun: float | None = None
        while True:
            batches = self._batches  # once, because the training may replace them
            if (decided := batches.decided) is None or step < batches.known_until:
                return batches
            epoch = batches.plan.epoch(number)
            if step == epoch.end_step and batches.plan.ends_whatever_follows(epoch):
                return batches
            thread = threading.current_thread()
            trains = not thread.daemon if self._trainer is None else thread.ident == self._trainer
            if trains:
                raise _reads_too_far_error(decided.adaptive.delay, step, batches.known_until, ahead)
            if abandoned() or not threading.main_thread().is_alive():
                raise AbandonedError
            with self._changed:
                if self._batches is batches:
                    self._changed.wait(WAIT_SECONDS)
            begun = _warn_of_long_wait(begun)


def _reads_too_far_error(delay: int, step: int, end_step: int, ahead: int) -> RuntimeError:
    """Return the error of a loader that reads step `step` in the thread of the training, which cannot wait."""
    return RuntimeError(
        f"a loader must not read updates whose batch size is not decided yet, but it reads update {step}, {ahead} "
        f"reads ahead of step(), and the batch sizes are known up to update {end_step - 1}; pass "
        f"delay=num_workers * prefetch_factor + 4 to the AdaptiveTrace, which is always enough, here at least "
        f"{max(delay + 1, ahead + ADOPTED_AFTER)}, or let the loader prefetch less"
    )


def _warn_of_long_wait(begun: float | None) -> float:
    """Warn once after `WARN_SECONDS`; return when the wait began, or infinity after the warning."""
    if begun is not None and time.monotonic() - begun > WARN_SECONDS:
        warnings.warn(
            f"A loader has waited {WARN_SECONDS:.0f} seconds in {threading.current_thread().name} for a batch size "
            f"that the training decides; if the training waits for this thread, pass a larger delay to the "
            f"AdaptiveTrace (num_workers * prefetch_factor + 4 is always enough)",
            UserWarning,
            stacklevel=3,
        )
        return float("inf")
    return time.monotonic() if begun is None else begun
