"""How far a loader reads ahead of the training, and what follows from it: heuristics, all in one place.

A sampler sees when microbatches are read, and an optimizer when they reach `step()`. In between a loader may prefetch,
and nobody tells either of them how many. Three heuristics tell prefetched microbatches from lost ones:

1. Loaders prefetch a constant number. The lead of the reads over the calls of `step()`, as the first of these calls
   finds it, stays the same until the sampler is exhausted: if it grows, the loop has skipped microbatches. A loop may
   read a whole update before it steps through it, so that the lead may be greater by what is left of the update. At
   the last microbatch nothing is left; so nothing that was skipped gets into an update.
2. A loader that reads in a thread of its own, like the device loader of torch_xla, may be ahead by any number. Nothing
   is concluded from its lead.
3. Where the lead is unknown, an epoch that was read to its end is incomplete if at most half of it reached `step()`.

`vbs.updates` reads whole updates, of any number of microbatches, and compares itself what it has read with the updates
that were made; nothing is concluded from the lead then, either.
"""

from __future__ import annotations

import threading
from typing import final


@final
class ReadAhead:
    """Counts the reads of an iteration, and the microbatches of it that reached `step()`.

    Attributes:
        yielded: number of microbatches that were read.
        stepped: number of microbatches that reached `step()`.
        exhausted: whether a read has met the end.
        all_updates_read: whether a loop over `vbs.updates` has got all updates.
    """

    def __init__(self) -> None:
        self.yielded, self.stepped = 0, 0
        self.exhausted = False
        self._reads = 0  # including those that met the end
        self._lead: int | None = None  # reads that had not reached step() when the first one did
        self._reader = 0  # the thread of the last read
        self._by_update, self.all_updates_read = False, False

    @property
    def begun(self) -> bool:
        """Whether there was a read."""
        return self._reads > 0

    def count_read(self) -> None:
        """Count a read, before it is known whether there is a microbatch left."""
        self._reader = threading.get_ident()
        self._reads += 1

    def read_by_update(self) -> None:
        """Conclude nothing from the lead, because whole updates are read."""
        self._by_update = True

    def count_step(self, received: int, ends_at: int) -> int:
        """Count a microbatch that reached `step()` after `received` others; return how many were skipped before it.

        The result is 0 if it is not known (heuristics 1 and 2).

        Args:
            received: number of microbatches that reached `step()` before.
            ends_at: that number at the end of the update of this microbatch.
        """
        self.stepped = max(self.stepped, received + 1)
        if self._by_update or self._reader != threading.get_ident():
            return 0
        lead = self._reads - received
        self._lead = lead if self._lead is None else self._lead
        left = ends_at - received - 1
        return lead - self._lead if lead > self._lead + left else 0

    @property
    def incomplete(self) -> bool:
        """Whether it was read to the end without a call of `step()` for all of it, as far as that is known."""
        if not self.exhausted or 0 < self.stepped == self.yielded:
            return False
        if self._lead is None:
            return 2 * self.stepped <= self.yielded  # heuristic 3
        return self._reads - self._lead > self.stepped  # a loop that breaks may have read one more
