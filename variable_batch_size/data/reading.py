"""What was read of an iteration, and which microbatches of it reached `step()`.

A sampler sees when microbatches are read, and an optimizer when they reach `step()`. In between a loader may prefetch.
`vbs.updates` stands behind the loader and says what the loop has got. Without it there is one check: a loader that
reads in the thread of the loop is ahead by a constant number of reads, 1 for a DataLoader without workers and
num_workers * prefetch_factor + 1 with some. If that lead grows, the loop has skipped microbatches; if it shrinks before
the end, `step()` was called too often. The first call of `step()` measures the constant, so that a microbatch that is
skipped before it is noticed only when the loop has ended. A loader that reads in a thread of its own has no constant.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import final

from torch import Tensor

from variable_batch_size.data.clock import Position
from variable_batch_size.data.deal import Dealing


@final
class Use(Enum):
    """What an optimizer has made of an iteration."""

    NEW = auto()  # no microbatch of it has reached step()
    CURRENT = auto()  # its next microbatch is the one that the optimizer expects
    STALE = auto()  # its next microbatch is not: the optimizer has moved since


@final
class ReadAhead:
    """Counts the reads of an iteration, and the microbatches of it that reached `step()`.

    Attributes:
        yielded: number of microbatches that were read.
        stepped: number of microbatches that reached `step()`.
        exhausted: whether a read has met the end.
        handed: number of microbatches that the loop has got from `vbs.updates`; None in a plain loop.
    """

    def __init__(self) -> None:
        self.yielded, self.stepped = 0, 0
        self.exhausted = False
        self.handed: int | None = None
        self._before = 0  # microbatches of the updates that the loop has got, but for the last one
        self._reads = 0  # including those that met the end
        self._lead: int | None = None  # of the reads over the calls of step(); None before the first one
        self._reader = 0  # the thread of the last read

    @property
    def begun(self) -> bool:
        """Whether there was a read."""
        return self._reads > 0

    @property
    def available(self) -> int:
        """How many microbatches may have reached `step()`."""
        return self.yielded if self.handed is None else self.handed

    def hand(self, *, begins_update: bool) -> None:
        """Count a microbatch that the loop gets; `begins_update`: all those before it must have reached `step()`."""
        self._before = self.handed or 0 if begins_update else self._before
        self.handed = 1 if self.handed is None else self.handed + 1

    def pass_over(self, number: int) -> None:
        """Count microbatches that a resumed loader has read on past, before the first one that the loop gets."""
        if self.handed is not None:
            self.handed, self._before = self.handed + number, self._before + number

    def count_read(self) -> None:
        """Count a read, before it is known whether there is a microbatch left."""
        self._reader = threading.get_ident()
        self._reads += 1

    def count_step(self, received: int) -> int:
        """Count a microbatch that reached `step()` after `received` others; return how many were skipped before it.

        The result is negative if `step()` was called too often, and 0 if nothing is wrong or known.
        """
        self.stepped = max(self.stepped, received + 1)
        if self.handed is not None:
            return max(0, self._before - received)
        if self._in_thread:
            return 0
        lead = self._reads - received
        self._lead = lead if self._lead is None else self._lead
        at_end = lead < self._lead and self.exhausted  # where a loader reads no further
        return 0 if at_end else lead - self._lead

    @property
    def left_over(self) -> bool:
        """Whether the loop has certainly read on after a microbatch that did not reach `step()`."""
        return self.stepped < self.yielded and self._taken > self.yielded

    @property
    def incomplete(self) -> bool:
        """Whether the loop, if it has ended, got a microbatch that did not reach `step()`, and all after it.

        If a loader reads in a thread, all that was read counts as received. With a loader that prefetches, a loop that
        leaves with the last one in hand counts as one that skips it.
        """
        if not self.exhausted or self.handed is not None or 0 < self.stepped == self.yielded:
            return False
        return self._lead is None or self._in_thread or self._taken >= self.yielded + (self._lead == 1)

    @property
    def _taken(self) -> int:
        """How many microbatches the loop has got, as far as that is known, or one more than there are."""
        return 0 if self._lead is None or self._in_thread else self._reads - (self._lead - 1)

    @property
    def _in_thread(self) -> bool:
        return self._reader != threading.get_ident()


@final
@dataclass(eq=False)
class Reading:
    """What a sampler and an optimizer know of one iteration.

    Attributes:
        dealing: how steps are split into microbatches and rounds.
        start: position of the first step.
        first_round: round of that step at which it starts.
        counts: what was read, and what reached `optimizer.step()`.
        resumed: whether its loader may have resumed from a snapshot before the optimizer's position.
        use: what the optimizer has made of it.
        gradients: those that there were when it was first read, of which none may be that of a microbatch.
    """

    dealing: Dealing
    start: Position
    first_round: int = 0
    counts: ReadAhead = field(default_factory=ReadAhead)
    resumed: bool = False
    use: Use = Use.NEW
    gradients: Sequence[Tensor] = ()

    def left_over(self) -> RuntimeError:
        """Return the error for microbatches that were read and did not reach `optimizer.step()`."""
        return RuntimeError(
            f"every microbatch of an epoch must reach optimizer.step(), but epoch {self.start.epoch} was read from "
            f"{self.start} to the end, {self.counts.yielded} microbatches, with {self.counts.stepped} calls of step(); "
            f"call it once per microbatch, and restore loader and optimizer together (to leave an epoch early, call "
            f"optimizer.discard_step(); to look at the data, use another sampler)"
        )
