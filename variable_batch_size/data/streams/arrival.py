"""How the rows of an update become microbatches. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from variable_batch_size._validation import IntArray
from variable_batch_size.microbatching import cut


def shares(size: int, capacities: Sequence[float]) -> list[int]:
    """Return what each shard gives to an update: as near to equal as the capacities allow, lower shards first.

    They sum to `size`, or to the sum of the capacities if that is less. A capacity that is larger than the share of its
    shard changes nothing.

    >>> shares(10, [2, 10, 10]), shares(10, [10, 10, 10]), shares(10, [1, 2, 3])
    ([2, 4, 4], [4, 3, 3], [1, 2, 3])
    """
    given = [0] * len(capacities)
    while size and (free := [number for number, room in enumerate(capacities) if room > given[number]]):
        least = min(capacities[number] - given[number] for number in free)
        each = max(1, int(min(least, size // len(free))))
        for number in free[:size]:  # fewer than the free ones get the last rows
            given[number] += each
        size -= each * len(free[:size])
    return given


def rows_in_order(rows: int, minibatch_size: int, *, fixed_shape: bool, rounds: int = 1) -> list[IntArray]:
    """Return the rows of microbatches of consecutive ones, as `cut` makes them: of a fixed shape with repeated rows.

    Args:
        rows: number of rows.
        minibatch_size: maximum number of rows of a microbatch.
        fixed_shape: whether each has that many.
        rounds: number of microbatches to make without a fixed shape, if there are as many rows and more are not needed.

    >>> [part.tolist() for part in rows_in_order(3, 4, fixed_shape=True)]
    [[0, 0, 0, 0], [1, 1, 2, 2]]
    """
    if rows == 0:
        return []
    sizes = cut(rows, minibatch_size, fixed_shape=fixed_shape, multiple_of=rounds)
    parts = [sizes.locate(number) for number in range(sizes.microbatches)]
    repeats = [minibatch_size // size if fixed_shape else 1 for _, size in parts]
    return [np.arange(start, start + n).repeat(times) for (start, n), times in zip(parts, repeats, strict=True)]
