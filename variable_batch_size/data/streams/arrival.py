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
    rows_of_shards = [0] * len(capacities)
    rows_missing = size
    while rows_missing > 0:
        shards_with_rows = [shard for shard, capacity in enumerate(capacities) if capacity > rows_of_shards[shard]]
        if not shards_with_rows:
            break
        # All shards with rows give equally many rows, until one of them is empty or none are missing.
        least_room = min(capacities[shard] - rows_of_shards[shard] for shard in shards_with_rows)
        rows_each = max(1, int(min(least_room, rows_missing // len(shards_with_rows))))
        takers = shards_with_rows[:rows_missing]  # the last rows are fewer than these shards
        for shard in takers:
            rows_of_shards[shard] += rows_each
        rows_missing -= rows_each * len(takers)
    return rows_of_shards


def rows_in_order(rows: int, minibatch_size: int, *, fixed_shape: bool, rounds: int = 1) -> list[IntArray]:
    """Return which rows of a batch make up each microbatch: consecutive ones, repeated where the shape is fixed.

    Args:
        rows: number of rows of the batch.
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
