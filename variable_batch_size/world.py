"""A rank and the size of its world, as a value that is passed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import check_int


@final
@dataclass(frozen=True, slots=True)
class World:
    """A rank in a world of `size` ranks: `0 <= rank < size`.

    >>> World(rank=1, size=4)
    World(rank=1, size=4)

    Raises:
        TypeError: for a rank or a size that is not an integer.
        ValueError: for a size < 1 or a rank outside [0, size).
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        rank, size = check_int(self.rank, "rank"), check_int(self.size, "num_replicas", 1)
        object.__setattr__(
            self, "rank", rank
        )  # as a plain int; the dataclass is frozen, and refuses `self.rank = rank`
        object.__setattr__(self, "size", size)
        if rank >= size:
            raise ValueError(
                f"a world needs num_replicas >= 1 and 0 <= rank < num_replicas, "
                f"got rank={rank} and num_replicas={size}; pass the rank of this process and the number of ranks"
            )
