"""Which rank writes which tensors of a checkpoint.

Ranks hold equal optimized parameters and equal states of optimizers, so any of them can write any of these tensors, as
a file of the checkpoint that is called its shard. Rank 0 writes all that may differ between ranks: buffers, frozen
parameters, further objects.
The distribution follows from the shapes of the tensors alone, which the ranks compare in the message that every save
exchanges anyway. What shares a storage stays together, so that tied tensors are written once and stay tied.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from variable_batch_size.checkpoint.snapshot import is_dense, map_tensors

SMALLEST = 4 << 20  # bytes of the smallest mean shard: a file for less takes longer than it saves


def assign(sizes: Sequence[int], world_size: int, others: int = 0) -> list[int]:
    """Return the rank that writes each storage: the largest first, each to the rank that has the least so far.

    At most so many ranks write that their shards have `SMALLEST` bytes on average. They are evenly spaced, because
    neighbors often share a host and its network.

    Args:
        sizes: bytes of each storage that any rank can write.
        world_size: number of ranks.
        others: bytes that only rank 0 can write.

    >>> assign([20 << 20, 10 << 20, 10 << 20], world_size=2)
    [0, 1, 1]
    """
    writers = max(1, min(world_size, sum(sizes) // SMALLEST))
    loads = [(0 if index else others, index * world_size // writers) for index in range(writers)]
    heapq.heapify(loads)
    ranks = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):  # stable: the same on all ranks
        load, ranks[index] = loads[0]
        heapq.heapreplace(loads, (load + sizes[index], ranks[index]))
    return ranks


@final
class Replicas(NamedTuple):
    """The tensors of a state that are equal on all ranks, as one rank finds them.

    Attributes:
        tensors: by their places in the state.
        storages: the number of the storage of each, in the same order.
        sizes: bytes of each storage.
        summary: what all ranks have to agree on, and the bytes that only this rank can write.
    """

    tensors: dict[str, Tensor]
    storages: list[int]
    sizes: list[int]
    summary: str

    @staticmethod
    def find(parts: dict[str, Any], equal: Iterable[Tensor]) -> Replicas:
        """Return the tensors of a state whose storages belong to tensors that are equal on all ranks.

        Raises:
            TypeError: if the state holds a value that `torch.load(weights_only=True)` cannot read.
        """
        known = {_storage(tensor) for tensor in equal if is_dense(tensor)}
        found, others = Replicas({}, [], [], ""), dict[tuple[torch.device, int], int]()
        numbers, digest = dict[tuple[torch.device, int], int](), hashlib.sha256()

        def look(tensor: Tensor, where: str) -> Tensor:
            if not is_dense(tensor) or not tensor.numel():
                return tensor
            storage, size = _storage(tensor), tensor.untyped_storage().nbytes()
            if storage not in known:
                others[storage] = size
                return tensor
            number = numbers.setdefault(storage, len(numbers))
            if number == len(found.sizes):
                found.sizes.append(size)
            found.tensors[where] = tensor
            found.storages.append(number)
            digest.update(f"{where} {tensor.dtype} {tuple(tensor.shape)} {number} {size};".encode())
            return tensor

        map_tensors(parts, look)
        return found._replace(summary=f"{digest.hexdigest()} {sum(others.values())}")

    def writers(self, summaries: Sequence[str]) -> dict[str, int]:
        """Return the ranks that write tensors, by place, without rank 0: it writes all others.

        Args:
            summaries: those of all ranks, by rank. If ranks have found different tensors, rank 0 writes all of them.
        """
        if len({summary.partition(" ")[0] for summary in summaries}) > 1:
            return {}
        ranks = assign(self.sizes, len(summaries), int(summaries[0].partition(" ")[2]))
        by_place = zip(self.tensors, self.storages, strict=True)
        return {where: ranks[storage] for where, storage in by_place if ranks[storage]}


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
