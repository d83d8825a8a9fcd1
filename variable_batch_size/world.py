"""A rank and a world, as a value that is passed in."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class World:
    """Which of how many ranks this is: `0 <= rank < size`.

    Raises:
        ValueError: when the two numbers do not fit together.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        rank, size = operator.index(self.rank), operator.index(self.size)
        if size < 1 or not 0 <= rank < size:
            raise ValueError(
                f"a world needs num_replicas >= 1 and 0 <= rank < num_replicas, "
                f"got rank={rank} and num_replicas={size}; pass this process's own rank and the number of all"
            )
