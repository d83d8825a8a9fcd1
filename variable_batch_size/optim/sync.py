"""Who sums the gradients of a step over the ranks: the backend (`PlainSync`), or what wraps the model (`syncs.py`)."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import final
from weakref import finalize, ref

from torch import OutOfMemoryError, Tensor
from torch.nn import Module

from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import AbsentRankError, Agreement
from variable_batch_size.optim.accumulation import Aside

RESTART = "so that the ranks may have made different updates; restart all ranks from the last checkpoint"


class Sync(ABC):
    """Sums the gradients of a step over the ranks.

    It learns before a microbatch whether that is the last one of this rank in the step, and asked for the sums after
    it.

    Attributes:
        in_backward: whether the last `backward()` of a step leaves the sum in `.grad`.
        loss_weighed: what needs losses that carry their weight, in words; empty if gradients are weighed.
        keeps_apart: whether gradients may be apart from `.grad` before the last `backward()` of a step.
        needs_counts: whether other ranks compute parts of the same samples, so that no rank knows its weight.
        module: what sums then.
        measures: whether the squares of microbatches are needed.
        scaled: whether the losses of the step are scaled by a `GradScaler`, which reads `.grad` after each of them.
        loss_scale: scale of the losses of the step under a `GradScaler`, 0-D, by which the sum in `backward()` divides.
    """

    in_backward: bool = False
    loss_weighed: str = ""
    keeps_apart: bool = False
    needs_counts: bool = False
    module: Module | None = None

    def __init__(self, backend: Backend) -> None:
        self.measures, self.scaled = False, False
        self.loss_scale: Tensor | None = None
        self._backend = backend
        self._begun = False  # whether the other ranks may have a sum that an exception has interrupted here

    def meet(self, agreement: Agreement) -> None:  # noqa: B027 (a no-op unless the ranks compute together)
        """Let the ranks agree, before the first forward; every rank has to call it."""

    def use(self, parameters: Sequence[Tensor]) -> None:  # noqa: B027 (a no-op unless `in_backward`)
        """Sum the gradients of these parameters from now on, all of the optimizer.

        Raises:
            ValueError: if it cannot.
        """

    def before(self, *, last: bool, weight: float, aside: Aside) -> None:  # noqa: B027 (a no-op unless `in_backward`)
        """Prepare for the forward and `backward()` of a microbatch, any number of times.

        Args:
            last: whether it is the last microbatch of this rank in the step.
            weight: its weight in the gradient of the step, and that of what is accumulated in `.grad`.
            aside: what is accumulated elsewhere.
        """

    def loss_weight(self, samples: float, batch_size: int) -> float:
        """Return by what the loss of a microbatch must be multiplied.

        Args:
            samples: those of the microbatch, divided by its rows if the loss is their sum.
            batch_size: those of the step.
        """
        return 1.0

    def sum_weight(self, batch_size: int) -> float:
        """Return by what the sum of a step must be multiplied."""
        return 1.0

    def square(self) -> Tensor | None:
        """Return the square of the gradient of the last microbatch if it was taken in `backward()`, 0-D."""
        return None

    @abstractmethod
    def sum(self, gradients: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Sum what a step has given over the ranks, in place, after the last `backward()`.

        Args:
            gradients: this rank's share of the gradients; the sums if `in_backward`.
            others: what travels with them.

        Raises:
            RuntimeError: if a rank does not take part.
        """

    def clear(self) -> None:
        """Forget the step, after its update or to start it over."""
        self.loss_scale = None

    def drop(self) -> None:  # noqa: B027 (a no-op unless `in_backward`)
        """Check that the gradients of the last `backward()` can be dropped on this rank alone.

        Raises:
            RuntimeError: if they were summed.
        """

    def restart(self) -> None:
        """Forget a sum that was interrupted: every rank loads a state."""
        self._begun = False
        self.clear()

    def prepare_discard(self, agreement: Agreement | None, timeout: float) -> None:
        """Prepare to discard the step, and check that it can be.

        Args:
            agreement: of all ranks, if there is one.
            timeout: seconds to wait for the other ranks, if all have to discard it.

        Raises:
            RuntimeError: if other ranks may have made its update.
        """
        if self._begun:
            raise RuntimeError(
                f"a step must be discarded before its gradients are summed over the ranks, but an exception came while "
                f"they were, {RESTART}, or load a state on every rank"
            )

    @final
    def _all_reduce(self, tensors: Sequence[Tensor]) -> None:
        self._begun = self._backend.world.size > 1
        try:
            self._backend.all_reduce_sum(tensors)
        except (AbsentRankError, OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise RuntimeError(f"a rank does not take part in the sum of the gradients, {RESTART}: {error}") from error
        self._begun = False


@final
class PlainSync(Sync):
    """The backend sums after the last `backward()`: one process, threads, XLA, and models that nothing wraps."""

    def sum(self, gradients: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Sum the shares, and what travels with them, by one collective for each dtype."""
        self._all_reduce([*gradients, *others])


_SECONDS_TO_LOOK = 1.0


@final
class Watch:
    """A thread that looks every second for a rank that does not come, while the host waits where no Python runs."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self._waits = backend, threading.Event()
        self._thread: threading.Thread | None = None
        finalize(self, self._waits.set).atexit = False

    def begin(self) -> None:
        """Look from now on."""
        self._waits.set()
        if self._thread is None:
            self._thread = threading.Thread(target=_look, args=(ref(self), self._waits), daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Look no longer."""
        self._waits.clear()


def _look(watch: ref[Watch], waits: threading.Event) -> None:
    while waits.wait():
        time.sleep(_SECONDS_TO_LOOK)
        if (alive := watch()) is None:
            return
        with suppress(RuntimeError):  # the sentence is in the store: the others end by it, and then this rank
            alive.backend.while_waiting(waits.is_set)
        del alive
