"""How the rows that each rank has brought to a step become microbatches. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np

from variable_batch_size._validation import IntArray, value_error
from variable_batch_size.data.batches import Batch
from variable_batch_size.microbatching import Microbatch, cut


def batch_of_rows(
    step: int, batch_size: int, num_microbatches: int, samples: Sequence[int], rows: Sequence[int], replays: int
) -> Batch:
    """Return an update whose rows are there, as one rank computes it.

    Args:
        step: number of the update.
        batch_size: samples of all ranks, or what their rows count.
        num_microbatches: of all ranks, without replays.
        samples: of each microbatch of this rank.
        rows: of each, with repeated ones, in the unit of `samples`.
        replays: number of replays before these.
    """
    sizes = [*[(0, 1)] * replays, *zip(samples, rows, strict=True)]
    microbatches = (
        Microbatch(step, batch_size, *size, start=number, number=number, ends_step=number == len(sizes) - 1)
        for number, size in enumerate(sizes)
    )
    return Batch(step, batch_size, 0, num_microbatches, tuple(microbatches))


@final
class Brought(NamedTuple):
    """What one rank has brought to a step, as all ranks hear of it.

    Attributes:
        rows: number of rows that count.
        samples: what these count.
        necessary: number of microbatches that they take at least.
        ended: whether no further batch comes on this rank.
        can_replay: whether it has a microbatch that it can repeat.
        total: number of rows that it was given, also of those that count nothing.
    """

    rows: int = 0
    samples: int = 0
    necessary: int = 0
    ended: bool = False
    can_replay: bool = False
    total: int = 0


def first_fit_decreasing(lengths: IntArray, capacity: int) -> list[IntArray]:
    """Return the rows of microbatches whose lengths sum to at most `capacity`: first-fit decreasing (Johnson 1973).

    There are at most 11/9 of the least number that is possible, and one more.

    Args:
        lengths: length of each row, (rows,).
        capacity: the largest sum.

    >>> [rows.tolist() for rows in first_fit_decreasing(np.array([3, 6, 4, 5, 2]), 10)]
    [[1, 2], [0, 3, 4]]

    Raises:
        ValueError: if a row is longer.
    """
    if len(lengths) and lengths.max() > capacity:
        raise value_error(
            f"every row must have at most max_tokens={capacity} tokens",
            f"{lengths.max()} in row {lengths.argmax()}",
            "shorten the rows, or pass a larger max_tokens",
        )
    free, packed = np.full(len(lengths), capacity), list[list[int]]()  # (rows,): room in each microbatch
    for row in np.argsort(-lengths, kind="stable").tolist():
        into = int(np.argmax(free >= lengths[row]))  # the first one with room
        if into == len(packed):
            packed.append([])
        packed[into].append(row)
        free[into] -= lengths[row]
    return [np.array(sorted(rows)) for rows in packed]


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


def rounds_by_rank(brought: Sequence[Brought], *, fixed: bool, equal: bool) -> list[int]:
    """Return how many microbatches each rank makes of its rows.

    Args:
        brought: by rank.
        fixed: whether the number of microbatches of some rows is fixed, as if they are packed.
        equal: whether each rank makes as many as the one that needs most, as far as it has rows.

    >>> rounds_by_rank([Brought(9, 9, 3), Brought(2, 2, 1), Brought()], fixed=False, equal=True)
    [3, 2, 0]
    """
    most = max(of_rank.necessary for of_rank in brought)
    return [of_rank.necessary if fixed or not equal else min(of_rank.rows, most) for of_rank in brought]
