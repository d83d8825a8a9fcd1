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

_SECONDS_TO_LOOK = 1.0
RESTART = "so that the ranks may have made different updates; restart all ranks from the last checkpoint"


class Sync(ABC):
    """Sums the gradients of a step over the ranks.

    `before` says whether the next microbatch is the last one of this rank in the step; `sum` comes after that one.
    """

    in_backward: bool = False  # whether the last `backward()` of a step leaves the sum in `.grad`
    loss_weighed: str = ""  # what needs losses that carry their weight, in words; empty if gradients are weighed
    keeps_apart: bool = False  # whether gradients may be apart from `.grad` before the last `backward()` of a step
    needs_counts: bool = False  # whether ranks compute parts of the same samples, so that none knows its weight
    module: Module | None = None

    def __init__(self, backend: Backend) -> None:
        self.measures = False  # whether the squares of microbatches are needed
        self.keeps_last = False  # whether the gradients of the last microbatch are needed, if they are summed in place
        self.last: dict[Tensor, Tensor] = {}  # these, by parameter; empty of a replay
        self.scaled = False  # whether a `GradScaler` scales the losses of the step, and reads `.grad` after each
        self.loss_scale: Tensor | None = None  # that scale, 0-D, by which a sum in `backward()` divides
        self._backend = backend
        self._begun = False  # whether the other ranks may have a sum that an exception has interrupted here

    def meet(self, agreement: Agreement) -> None:  # noqa: B027 (a no-op unless the ranks compute together)
        """Let the ranks agree, before the first forward; every rank has to call it."""

    def use(self, parameters: Sequence[Tensor]) -> None:  # noqa: B027 (a no-op unless `in_backward`)
        """Sum the gradients of these parameters from now on, all of the optimizer."""

    def before(self, *, last: bool, weight: float, aside: Aside) -> None:  # noqa: B027 (a no-op unless `in_backward`)
        """Prepare for the forward and `backward()` of a microbatch, any number of times.

        `weight` is that of the microbatch, and of what is accumulated in `.grad`; the rest of the step is `aside`.
        """

    def loss_weight(self, samples: float, batch_size: int) -> float:
        """Return the factor on a microbatch's loss; `samples` are divided by its rows if the loss is their sum."""
        return 1.0

    def sum_weight(self, batch_size: int) -> float:
        """Return the factor on the sum of a step."""
        return 1.0

    def square(self) -> Tensor | None:
        """Return the square of the gradient of the last microbatch if it was taken in `backward()`, 0-D."""
        return None

    @abstractmethod
    def sum(self, gradients: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Sum this rank's gradients (unless `in_backward`), and what travels with them, over the ranks, in place.

        It comes after the last `backward()` of the step.
        """

    def clear(self) -> None:
        """Forget the step, after its update or to start it over."""
        self.loss_scale, self.last = None, {}

    def drop(self) -> None:  # noqa: B027 (a no-op unless `in_backward`)
        """Check that the gradients of the last `backward()` can be dropped on this rank alone."""

    def restart(self) -> None:
        """Forget a sum that was interrupted: every rank loads a state."""
        self._begun = False
        self.clear()

    def reset(self) -> None:  # noqa: B027 (a no-op unless `in_backward`)
        """Let the model expect a new forward."""

    @final
    def prepare_discard(self, agreement: Agreement | None, timeout: float) -> None:
        """Check that the step can be discarded: if `backward()` sums, all ranks have to within `timeout` seconds."""
        if self.in_backward:  # what was summed cannot be called back
            assert agreement is not None  # the optimizer has created it
            agreement.gather("discard_step()", "", timeout)
            self.reset()
        elif self._begun:
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
            if self._backend.elastic:  # which says what is wrong, and whose other ranks go on without this one
                self._begun = False
                raise
            raise RuntimeError(f"a rank does not take part in the sum of the gradients, {RESTART}: {error}") from error
        self._begun = False


@final
class PlainSync(Sync):
    """The backend sums after the last `backward()`: one process, threads, XLA, and models that nothing wraps."""

    def sum(self, gradients: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Sum the shares, and what travels with them, by one collective for each dtype."""
        self._all_reduce([*gradients, *others])


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
