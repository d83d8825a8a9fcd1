"""Where a loader waits for a batch size that a controller has not decided yet."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable

from variable_batch_size.adaptive.decided_trace import ADOPTED_AFTER
from variable_batch_size.data.batches import Batches
from variable_batch_size.data.training import Training

WAIT_SECONDS = 0.5  # after which a waiting loader looks whether anybody still reads what it would read
WARN_SECONDS = 30.0  # of waiting


class PrefetchCancelled(Exception):  # noqa: N818 (not an error: the loader ends)
    """The iteration that asked for this batch has been replaced."""


def wait_for(
    training: Training, number: int, step: int, ahead: int, *, abandoned: Callable[[], bool] = lambda: False
) -> Batches:
    """Wait until a controller has chosen the batch size of a step that a loader is to read, and return the batches.

    A loader may read in a thread of its own, ahead of the training: there it waits. The thread of the training cannot
    wait for itself and gets an error. Before the first update it is not known which thread that is: only a daemon, as
    the thread of a loader is, waits then.

    Args:
        training: the training, whose batches a decision replaces.
        number: number of the epoch.
        step: the step, whose size is not waited for if the epoch is known to end before it.
        ahead: number of microbatches, or of updates, that were read and not trained on, with this one.
        abandoned: function that returns whether what the caller would read is not needed any more.

    Raises:
        RuntimeError: if the thread of the training would have to wait.
        PrefetchCancelled: if what the caller would read is not needed any more.
    """
    wait_began: float | None = None
    while True:
        batches = training.batches  # once, because the training may replace them
        decided = batches.decided
        if decided is None or step < batches.known_until:
            return batches
        epoch = batches.plan.epoch(number)
        if step == epoch.end_step and batches.plan.ends_whatever_follows(epoch):
            return batches
        thread = threading.current_thread()
        may_train = not thread.daemon if training.trainer is None else thread.ident == training.trainer
        if may_train:  # it would wait for itself
            raise _reads_too_far_error(decided.adaptive.delay, step, batches.known_until, ahead)
        if abandoned() or not threading.main_thread().is_alive():
            raise PrefetchCancelled
        with training.changed:
            if training.batches is batches:  # no decision has come meanwhile
                training.changed.wait(WAIT_SECONDS)
        wait_began = _warn_of_long_wait(wait_began)


def _reads_too_far_error(delay: int, step: int, end_step: int, ahead: int) -> RuntimeError:
    """Return the error of a loader that reads ahead of a controller in the thread that trains, and so cannot wait.

    Args:
        delay: number of updates from a decision of the controller to its use.
        step: the update that the loader reads.
        end_step: the first update whose batch size is not known yet.
        ahead: number of reads by which the loader is ahead of the training.
    """
    last_known = end_step - 1
    needed_delay = max(delay + 1, ahead + ADOPTED_AFTER)
    return RuntimeError(
        f"the loader reads update {step}, {ahead} reads ahead of step(), but sizes are known up to {last_known}; pass "
        f"delay=num_workers * prefetch_factor + 4 (at least {needed_delay}) to AdaptiveTrace"
    )


def _warn_of_long_wait(wait_began: float | None) -> float:
    """Warn once if a loader has waited for a batch size for longer than `WARN_SECONDS`.

    Args:
        wait_began: what the last call returned; None in the first one.

    Returns:
        When the wait began, in seconds of the monotonic clock; infinity after the warning.
    """
    if wait_began is not None and time.monotonic() - wait_began > WARN_SECONDS:
        thread = threading.current_thread().name
        warnings.warn(
            f"A loader has waited {WARN_SECONDS:.0f} seconds in {thread} for a batch size of the training; if the "
            "training waits for this thread, pass delay=num_workers * prefetch_factor + 4 to the AdaptiveTrace",
            UserWarning,
            stacklevel=3,
        )
        return float("inf")
    return time.monotonic() if wait_began is None else wait_began
