"""Stop all ranks after the same update, although no rank waits for another.

Ranks can be any number of updates apart, because devices execute work that the host has queued. Each rank therefore
reserves, in a store that all ranks share, the updates that it makes before it next checks for a request. A rank that
wants to stop writes the request first and then reads the reservations: all ranks stop after the last reserved update.
A rank that reserves too late sees the request at its next check.
"""

from __future__ import annotations

import math
import time
from typing import final

import torch.distributed as dist

from variable_batch_size.world import World

_REQUESTED, _LAST = "requested", "last"  # keys of the store
_MAX_SHARE = 0.01  # largest share of an update's time to spend on checks
_MAX_INTERVAL = 1.0  # seconds between two checks, unless one update takes longer


@final
class CoordinatedStop:
    """Agreement of the ranks of a world on the update after which all of them stop.

    All ranks must create one before the same update.

    Args:
        store: store that all ranks share.
        name: name of this stop in the store; unique there, and the same on all ranks.
        world: this rank and the number of ranks.
    """

    def __init__(self, store: dist.Store, name: str, world: World) -> None:
        self._store, self._world = dist.PrefixStore(f"variable_batch_size/{name}", store), world
        self._updates = 0  # made since this object was created
        self._reserved = 1  # a rank that has written nothing has reserved one update
        self._last: int | None = None  # update after which all ranks stop, once it is agreed
        self._checked_update, self._checked_time = 0, time.perf_counter()
        self._store.check([_REQUESTED])
        self._check_seconds = time.perf_counter() - self._checked_time

    def after_update(self, wanted: bool) -> bool:
        """Count an update of this rank, and return whether all ranks stop after it.

        Args:
            wanted: whether this rank wants to stop.
        """
        self._updates += 1
        if self._last is None and (wanted or self._updates >= self._reserved):
            self._check(wanted)
        return self._last is not None and self._updates >= self._last

    def _check(self, wanted: bool) -> None:
        began = time.perf_counter()
        if wanted:
            self._store.set(_REQUESTED, "")
        else:
            self._reserve(self._updates + self._interval(began))
        if self._store.check([_REQUESTED]):
            self._reserve(self._updates)  # this rank makes no further update before it knows the last one
            last = max(map(self._reserved_by, range(self._world.size)))
            self._last = int(self._store.compare_set(_LAST, "", str(last)))  # ranks may differ: the first one counts
        self._checked_update, self._checked_time = self._updates, time.perf_counter()
        self._check_seconds += (self._checked_time - began - self._check_seconds) / 4

    def _reserve(self, update: int) -> None:
        self._reserved = update
        self._store.set(str(self._world.rank), str(update))

    def _reserved_by(self, rank: int) -> int:
        key = str(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 1

    def _interval(self, now: float) -> int:
        """Return the number of updates until the next check, such that checks take a small share of the time."""
        update_seconds = (now - self._checked_time) / (self._updates - self._checked_update)
        return max(1, math.ceil(min(self._check_seconds / _MAX_SHARE, _MAX_INTERVAL) / max(update_seconds, 1e-9)))
