"""What a rank has alone of the state: buffers that forward writes, parts that count for themselves, and the like.

Ranks compare whatever is not shared by its contents. What differs is saved for each rank, where all write: the tensors
of rank 2 by names that begin with "/2/". A training in a world of the same size gets it again, rank by rank; in another
one all ranks get what rank 0 has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple, final

from torch import Tensor

from variable_batch_size.checkpoint.shared_state import byte_digests, digest
from variable_batch_size.checkpoint.values import Json


@final
class PerRank(NamedTuple):
    """The names of the tensors and of the parts that each rank has for itself."""

    tensors: Set[str] = frozenset()
    parts: Set[str] = frozenset()

    def __or__(self, other: PerRank) -> PerRank:
        return PerRank(self.tensors | other.tensors, self.parts | other.parts)


@final
class Compared(NamedTuple):
    """What one rank says of that which is not shared.

    Attributes:
        tensors: the digest of each, with dtype and shape, by name.
        parts: the digest of what is in each part besides tensors, by name.
    """

    tensors: dict[str, str]
    parts: dict[str, str]

    @staticmethod
    def of_state(tensors: Mapping[str, Tensor], parts: Mapping[str, Json]) -> Compared:
        """Return what a rank says of these tensors, of the host or a GPU, and of these parts."""
        digests = byte_digests(tensors)
        digests_with_shapes = {
            name: f"{digests[name]} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()
        }
        return Compared(digests_with_shapes, {name: digest(part) for name, part in parts.items()})


def find_differing(ranks: Sequence[Compared]) -> PerRank:
    """Return what is not the same on all ranks.

    Raises:
        RuntimeError: if a part is not on all of them.
    """
    for name in sorted({name for one in ranks for name in one.parts}):
        if without := [str(rank) for rank, one in enumerate(ranks) if name not in one.parts]:
            raise RuntimeError(
                f"every rank must save the same parts, but rank {without[0]} has no {name}; pass it to Checkpoint on "
                f"every rank"
            )
    tensors, parts = (
        frozenset(name for one in by_rank for name in one if len({other.get(name) for other in by_rank}) > 1)
        for by_rank in zip(*ranks, strict=True)
    )
    return PerRank(tensors, parts)
