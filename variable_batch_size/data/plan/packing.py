"""How rows of unequal lengths become microbatches of a bounded size. Pure functions of numbers."""

from __future__ import annotations

import heapq

import numpy as np

from variable_batch_size._validation import IntArray, value_error


def first_fit_decreasing(lengths: IntArray, capacity: int) -> list[IntArray]:
    """Return the rows of each microbatch, packed so that their lengths sum to at most `capacity`.

    The method is first-fit decreasing (Johnson 1973): the longest row first, each into the first microbatch with room.
    It makes at most 11/9 of the smallest number of microbatches that is possible, and one more.

    Args:
        lengths: length of each row, (rows,).
        capacity: the largest sum of lengths in a microbatch.

    >>> [rows.tolist() for rows in first_fit_decreasing(np.array([3, 6, 4, 5, 2]), 10)]
    [[1, 2], [0, 3, 4]]

    Raises:
        ValueError: if a row is longer than `capacity`.
    """
    if len(lengths) and lengths.max() > capacity:
        raise value_error(
            f"every row must have at most max_tokens={capacity} tokens",
            f"{lengths.max()} in row {lengths.argmax()}",
            "shorten the rows, or pass a larger max_tokens",
        )
    packed = list[list[int]]()
    room = np.full(len(lengths), capacity)  # (rows,): in each microbatch, of which there are at most as many as rows
    sizes = lengths.tolist()
    for row in np.argsort(-lengths, kind="stable").tolist():
        target = int((room[: len(packed) + 1] >= sizes[row]).argmax())  # the first with room: the last one is empty
        if target == len(packed):
            packed.append([])
        packed[target].append(row)
        room[target] -= sizes[row]
    return [np.array(sorted(rows)) for rows in packed]


def padded_groups(lengths: IntArray, capacity: int) -> list[IntArray]:
    """Return the rows of microbatches that hold at most `capacity` tokens when rows are padded to the longest one.

    Rows of similar length come together: the longest ones form the first microbatch.

    Args:
        lengths: length of each row, at most `capacity`, (rows,).
        capacity: the largest product of the number of rows and the length of the longest one.

    >>> [rows.tolist() for rows in padded_groups(np.array([3, 6, 4, 5, 2]), 10)]
    [[1], [2, 3], [0, 4]]
    """
    order = np.argsort(-lengths, kind="stable")
    groups, begin = list[IntArray](), 0
    while begin < len(order):
        end = begin + capacity // max(1, int(lengths[order[begin]]))
        groups.append(np.sort(order[begin:end]))
        begin = end
    return groups


def spread_evenly(lengths: IntArray, number: int) -> list[IntArray]:
    """Return the rows of `number` parts of similar size: the longest row first, each into the emptiest part.

    Args:
        lengths: length of each row, in tokens, (rows,).
        number: number of parts, at most as many as rows.

    >>> [rows.tolist() for rows in spread_evenly(np.array([3, 6, 4, 5, 2]), 2)]
    [[0, 1, 4], [2, 3]]
    """
    heap = [(0, part) for part in range(number)]  # the sum of the lengths of each part; the smallest comes first
    rows_by_part: list[list[int]] = [[] for _ in range(number)]
    for row in np.argsort(-lengths, kind="stable").tolist():
        total, part = heapq.heappop(heap)
        rows_by_part[part].append(row)
        heapq.heappush(heap, (total + int(lengths[row]), part))
    return [np.array(sorted(rows)) for rows in rows_by_part]


def padded_evenly(lengths: IntArray, capacity: int, number: int) -> list[IntArray]:
    """Return the rows of at most `number` microbatches of similar size, in which rows are padded to the longest one.

    It looks for the smallest capacity with which `padded_groups` makes so few microbatches: a smaller capacity makes
    them more equal.

    Args:
        lengths: length of each row, in tokens, (rows,).
        capacity: the largest product of the number of rows and the length of the longest one.
        number: number of microbatches; with `capacity` so many must suffice.
    """
    low, high = int(lengths.max()), capacity  # bisection: `high` suffices, what is below `low` does not
    while low < high:
        candidate = (low + high) // 2
        if len(padded_groups(lengths, candidate)) <= number:
            high = candidate
        else:
            low = candidate + 1
    return padded_groups(lengths, low)
