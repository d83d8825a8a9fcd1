"""Agreements of ranks that are threads and have nothing in common but a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch import Tensor

from variable_batch_size.backend import Backend, World
from variable_batch_size.backend.agreement import Agreement

Result = TypeVar("Result")


@final
class OfStore(Backend):
    """Ranks that have nothing in common but a store."""

    def __init__(self, store: dist.Store, world: World) -> None:
        super().__init__(world)
        self._store = store

    def store(self) -> dist.Store:
        return self._store

    def _gather_bytes(self, message: bytes) -> list[bytes]:
        """What a collective does, once for each Agreement."""
        rank, size = self.world.rank, self.world.size
        number = self._store.add(f"messages of {size}/{rank}", 1)
        keys = [f"messages of {size}/{number}/{other}" for other in range(size)]
        self._store.set(keys[rank], message.decode())
        return [self._store.get(key) for key in keys]

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        raise AssertionError("an Agreement needs one collective only, to begin")


def in_threads(work: Callable[[int], Result], size: int) -> list[Result]:
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(work, rank) for rank in range(size)]]


def agreements(stores: Sequence[dist.Store]) -> list[Agreement]:
    """One for each rank, which has a store, or a connection, of its own."""
    size = len(stores)
    return in_threads(lambda rank: Agreement(OfStore(stores[rank], World(rank, size))), size)


def message_of(call: Callable[[], object]) -> Any:
    """What a call returns, or the message of its error."""
    try:
        return call()
    except RuntimeError as error:
        return str(error)
