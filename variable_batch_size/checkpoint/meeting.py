"""Let all ranks meet after the same update, to save or to stop, although no rank waits for another before.

Ranks can be any number of updates apart, because devices execute work that the host has queued. Each rank therefore
reserves, in a store that all ranks share, the updates that it makes before it next checks for a request. A rank that
wants to meet writes the request first and then reads the reservations: all ranks meet after the last reserved update.
A rank that reserves too late sees the request at its next check.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import final

import torch.distributed as dist

from variable_batch_size.world import World

_REQUESTED, _LAST = "requested", "last"  # keys of the store, beside the ranks
_MAX_SHARE = 0.01  # largest share of an update's time to spend on checks
_MAX_INTERVAL = 1.0  # seconds between two checks, unless one update takes longer


@final
class Meetings:
    """Agreements of the ranks of a world on the updates after which all of them do something together.

    All ranks must create one before the same update.

    Args:
        store: store that all ranks share.
        name: name of these meetings in the store; unique there, and the same on all ranks.
        world: this rank and the number of ranks.
    """

    def __init__(self, store: dist.Store, name: str, world: World) -> None:
        self._store, self._world = dist.PrefixStore(name, store), world
        self._updates = 0  # made since this object was created
        self._number, self._held = 0, 0  # of the next meeting, and the update after which the previous one was held
        self._reserved = 1  # a rank that has written nothing has reserved one update after the previous meeting
        self._next: int | None = None  # update after which all ranks meet, once it is agreed
        self._checked_update, self._checked_time = 0, time.perf_counter()
        self._store.check([_REQUESTED])
        self._check_seconds = time.perf_counter() - self._checked_time

    def after_update(self, wanted: bool) -> bool:
        """Count an update of this rank, and return whether all ranks meet after it.

        Args:
            wanted: whether this rank wants to meet; it has to ask again after a meeting.
        """
        self._updates += 1
        if self._next is None and (wanted or self._updates >= self._reserved):
            # If the process with the store has ended, it has made the last update, or the next sum of gradients fails.
            with suppress(dist.DistNetworkError):
                self._check(wanted)
        if self._next is None or self._updates < self._next:
            return False
        self._number, self._held, self._reserved, self._next = self._number + 1, self._updates, self._updates + 1, None
        return True

    def _check(self, wanted: bool) -> None:
        began = time.perf_counter()
        if wanted:
            self._store.set(self._key(_REQUESTED), "")
        else:
            self._reserve(self._updates + self._interval(began))
        if self._store.check([self._key(_REQUESTED)]):
            self._reserve(self._updates)  # this rank makes no further update before it knows the next meeting
            last = max(map(self._reserved_by, range(self._world.size)))
            # Ranks may find different ones: the first counts.
            self._next = int(self._store.compare_set(self._key(_LAST), "", str(last)))
        self._checked_update, self._checked_time = self._updates, time.perf_counter()
        self._check_seconds += (self._checked_time - began - self._check_seconds) / 4

    def _key(self, name: object) -> str:
        return f"{self._number}/{name}"

    def _reserve(self, update: int) -> None:
        self._reserved = update
        self._store.set(self._key(self._world.rank), str(update))

    def _reserved_by(self, rank: int) -> int:
        key = self._key(rank)
        return int(self._store.get(key)) if self._store.check([key]) else self._held + 1

    def _interval(self, now: float) -> int:
        """Return the number of updates until the next check, such that checks take a small share of the time."""
        update_seconds = (now - self._checked_time) / (self._updates - self._checked_update)
        return max(1, math.ceil(min(self._check_seconds / _MAX_SHARE, _MAX_INTERVAL) / max(update_seconds, 1e-9)))
