"""How many rows each shard gives to an update, and how rows become microbatches. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from variable_batch_size._validation import IntArray
from variable_batch_size.microbatching import cut


def shares(size: int, capacities: Sequence[float]) -> list[int]:
    """Return how many rows each shard gives to an update: as near to equal as capacities allow, lower shards first.

    The numbers sum to `size`, or to the sum of the capacities if that is less. A capacity that is larger than the share
    of its shard changes nothing.

    Args:
        size: number of rows of the update.
        capacities: the most that each shard can give.

    >>> shares(10, [2, 10, 10]), shares(10, [10, 10, 10]), shares(10, [1, 2, 3])
    ([2, 4, 4], [4, 3, 3], [1, 2, 3])
    """
    result = [0] * len(capacities)
    missing = size
    while missing > 0:
        free = [shard for shard, capacity in enumerate(capacities) if capacity > result[shard]]
        if not free:
            break
        # All free shards give equally many rows, until one of them is empty or none are missing.
        least_room = min(capacities[shard] - result[shard] for shard in free)
        rows_each = max(1, int(min(least_room, missing // len(free))))
        takers = free[:missing]  # the last rows are fewer than the free shards
        for shard in takers:
            result[shard] += rows_each
        missing -= rows_each * len(takers)
    return result


def rows_in_order(rows: int, minibatch_size: int, *, fixed_shape: bool, rounds: int = 1) -> list[IntArray]:
    """Return the rows of each microbatch: consecutive ones, which are repeated where the shape is fixed.

    Args:
        rows: number of rows.
        minibatch_size: maximum number of rows of a microbatch.
        fixed_shape: whether each microbatch has exactly that many rows.
        rounds: number of microbatches to make without a fixed shape, if there are as many rows and fewer suffice.

    >>> [part.tolist() for part in rows_in_order(3, 4, fixed_shape=True)]
    [[0, 0, 0, 0], [1, 1, 2, 2]]
    """
    if rows == 0:
        return []
    sizes = cut(rows, minibatch_size, fixed_shape=fixed_shape, multiple_of=rounds)
    microbatches = []
    for number in range(sizes.microbatches):
        start, size = sizes.locate(number)
        times = minibatch_size // size if fixed_shape else 1
        microbatches.append(np.arange(start, start + size).repeat(times))
    return microbatches
