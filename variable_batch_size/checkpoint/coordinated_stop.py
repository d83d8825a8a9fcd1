"""How all ranks come to stop after the same update, though none waits for another.

A rank that has started an update can be ahead of others by any number of them, where devices work through what the
host has queued. So each rank reserves the updates that it goes through without asking, in a store that all ranks see.
Who wants to stop says so there first, and then reads what the others have reserved: the last of these updates is where
all stop. One that reserves too late to be read finds, as it asks next, that it has been said.
"""

from __future__ import annotations

import math
import time
from typing import final

import torch.distributed as dist

from variable_batch_size.world import World

_WANTED, _LAST = "wanted", "last"
_SHARE = 0.01  # of the time of an update that may go into asking
_PATIENCE = 1.0  # seconds that a rank may go on without asking, if an update does not take longer


@final
class CommonStop:
    """Of the ranks of a world; each makes one, and they all count the same updates from there.

    Args:
        store: that all ranks see.
        name: of this stop, which no other one in the store has; the same on all ranks.
        world: of these ranks.
    """

    def __init__(self, store: dist.Store, name: str, world: World) -> None:
        self._store, self._world = dist.PrefixStore(f"variable_batch_size/{name}", store), world
        self._passed, self._reserved = 0, 1  # one update is reserved by a rank that has written nothing
        self._last: int | None = None
        self._asked_at, self._asked_when = 0, time.perf_counter()
        self._store.check([_WANTED])
        self._cost = time.perf_counter() - self._asked_when  # seconds that it takes to ask

    def after_update(self, wanted: bool) -> bool:
        """Whether all ranks stop after this update, the next one that this rank has made.

        Args:
            wanted: whether this rank wants that.
        """
        self._passed += 1
        if self._last is None and (wanted or self._passed >= self._reserved):
            self._ask(wanted)
        return self._last is not None and self._passed >= self._last

    def _ask(self, wanted: bool) -> None:
        began = time.perf_counter()
        if wanted:
            self._store.set(_WANTED, "")
        else:
            self._reserve(self._passed + self._ahead(began))
        if self._store.check([_WANTED]):
            self._reserve(self._passed)  # it goes no further without knowing
            last = max(map(self._reserved_by, range(self._world.size)))
            self._last = int(self._store.compare_set(_LAST, "", str(last)))  # of several answers the first one holds
        self._asked_at, self._asked_when = self._passed, time.perf_counter()
        self._cost += (self._asked_when - began - self._cost) / 4

    def _reserve(self, update: int) -> None:
        self._reserved = update
        self._store.set(str(self._world.rank), str(update))

    def _reserved_by(self, rank: int) -> int:
        key = str(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 1

    def _ahead(self, now: float) -> int:
        """How many updates to reserve, so that asking takes a small share of their time."""
        update = (now - self._asked_when) / (self._passed - self._asked_at)  # seconds
        return max(1, math.ceil(min(self._cost / _SHARE, _PATIENCE) / max(update, 1e-9)))
