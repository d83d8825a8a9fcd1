"""Which rank writes which tensors of a checkpoint, and which part of one it has.

Each rank writes the part that it has of a sharded tensor (a DTensor); if several ranks have the same part, one writes
it. Parameters that are optimized and states of optimizers are equal on all ranks, so any rank can write any of these.
Rank 0 writes all else that is equal: buffers, frozen parameters, further objects; see `compare` for what is not.
All of it follows from names and shapes alone, which every rank has: none waits for another one to know what to write.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

SMALLEST = 4 << 20  # bytes of the smallest mean shard: a file for less takes longer than it saves


def assign_writers(sizes: Mapping[str, int], world_size: int, others: int = 0) -> dict[str, int]:
    """Return the rank that writes each tensor: the largest first, each to the rank that has the least so far.

    At most so many ranks write that their shards have `SMALLEST` bytes on average. They are evenly spaced, because
    neighbors often share a host and its network.

    Args:
        sizes: bytes of each tensor that any rank can write, by name.
        world_size: number of ranks.
        others: bytes that only rank 0 can write.

    >>> assign_writers({"a": 20 << 20, "b": 10 << 20, "c": 10 << 20}, world_size=2)
    {'a': 0, 'b': 1, 'c': 1}
    """
    num_writers = max(1, min(world_size, sum(sizes.values()) // SMALLEST))
    # Bytes that a rank writes so far, and the rank.
    loads = [(0 if index else others, index * world_size // num_writers) for index in range(num_writers)]
    heapq.heapify(loads)  # the smallest load comes first
    rank_by_name = dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # stable: the same on all ranks
        load, rank_by_name[name] = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], rank_by_name[name]))
    return rank_by_name


@final
class Part(NamedTuple):
    """The part of a tensor that a rank has.

    Attributes:
        offset: index of its first element in the whole tensor, for each dimension.
        shape: the shape of the part.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Part:
        """Return the part that is all of a tensor."""
        return Part((0,) * len(shape), tuple(shape))

    @staticmethod
    def on_rank(tensor: Tensor) -> Part:
        """Return which part of a tensor this rank has; of one that is not sharded, the whole.

        The dimensions of the mesh cut the tensor one after the other. Those with a `_StridedShard`, by which FSDP2
        shards what tensor parallelism has already cut, come last. It is not left to torch, because torch 2.9 computes a
        wrong part if the chunks are not equal.

        Raises:
            ValueError: if the local tensor has another shape: the tensor is sharded in a way that is not known.
        """
        offset, shape = map(list, Part.whole(tensor.shape))
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            coordinate = tensor.device_mesh.get_coordinate() or []
            # Sorted by False before True: the dimensions of the mesh with a plain Shard come first.
            order = sorted((type(placement) is not Shard, dim) for dim, placement in enumerate(tensor.placements))
            for _, mesh_dim in order:
                cut_dim = getattr(tensor.placements[mesh_dim], "dim", None)  # of the tensor; None if it is not cut
                if cut_dim is not None:
                    size = -(-shape[cut_dim] // mesh.size(mesh_dim))  # rounded up, so that the last chunk is smaller
                    begin = min(coordinate[mesh_dim] * size, shape[cut_dim])
                    offset[cut_dim] += begin
                    shape[cut_dim] = min(size, shape[cut_dim] - begin)
            actual = tuple(tensor.to_local().shape)
            if tuple(shape) != actual:
                raise ValueError(
                    f"a checkpoint needs a part of shape {tuple(shape)} of a tensor of shape {tuple(tensor.shape)} "
                    f"with placements {tensor.placements}, but this rank has {actual}; shard it with fully_shard() and "
                    "parallelize_module()"
                )
        return Part(tuple(offset), tuple(shape))

    def overlap(self, other: Part) -> Part | None:
        """Return the part of the whole tensor that is in both parts; None if they have no element in common."""
        # For each dimension, the part from the larger begin to the smaller end.
        begins = [max(offsets) for offsets in zip(self.offset, other.offset, strict=True)]
        ends = [min(a + length, b + other_length) for a, length, b, other_length in zip(*self, *other, strict=True)]
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return None if any(length <= 0 for length in shape) else Part(tuple(begins), shape)

    def slices(self, within: Part) -> tuple[slice, ...]:
        """Return the slices that cut this part out of the tensor of another part, `within`, which contains it."""
        first_indices = [begin - outer_begin for begin, outer_begin in zip(self.offset, within.offset, strict=True)]
        return tuple(slice(first, first + length) for first, length in zip(first_indices, self.shape, strict=True))


def is_writer(name: str, tensor: DTensor) -> bool:
    """Return whether this rank writes its part of a sharded tensor: one of the ranks that have the same part does.

    A hash of the name chooses that rank, so that tensors are spread over the ranks without communication.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None or not bool((mesh.mesh == 0).any()) or not tensor.to_local().numel():
        return False  # a mesh without rank 0 has replicas of what the mesh with rank 0 has
    replicas = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(coordinate[dim] == zlib.crc32(name.encode()) % mesh.size(dim) for dim in replicas)


def placed_like(part: Tensor, like: DTensor) -> DTensor:
    """Return a sharded tensor made of the parts on all ranks, with mesh, placements and shape of another one.

    Args:
        part: the part on this rank.
        like: the other tensor.
    """
    placement = like.device_mesh, like.placements
    return DTensor.from_local(part.to(like.device), *placement, shape=like.shape, stride=like.stride())
