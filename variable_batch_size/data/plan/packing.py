"""How rows of unequal lengths become microbatches of a bounded size. Pure functions of numbers."""

from __future__ import annotations

import heapq

import numpy as np

from variable_batch_size._validation import IntArray, value_error


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
    sizes = lengths.tolist()
    for row in np.argsort(-lengths, kind="stable").tolist():
        into = int((free[: len(packed) + 1] >= sizes[row]).argmax())  # the first one with room, or a new one
        if into == len(packed):
            packed.append([])
        packed[into].append(row)
        free[into] -= sizes[row]
    return [np.array(sorted(rows)) for rows in packed]


def padded_groups(lengths: IntArray, capacity: int) -> list[IntArray]:
    """Return the rows of microbatches in which number of rows x longest row is at most `capacity`: the longest first.

    Args:
        lengths: length of each row, at most `capacity`, (rows,).
        capacity: the largest product.

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
    """Return the rows of this number of parts of similar size: the longest row first, each into the emptiest part.

    Args:
        lengths: of the rows, (rows,).
        number: of parts, at most as many as rows.
    """
    heap = [(0, part) for part in range(number)]
    parts: list[list[int]] = [[] for _ in range(number)]
    for row in np.argsort(-lengths, kind="stable").tolist():
        total, part = heapq.heappop(heap)
        parts[part].append(row)
        heapq.heappush(heap, (total + int(lengths[row]), part))
    return [np.array(sorted(rows)) for rows in parts]


def padded_evenly(lengths: IntArray, capacity: int, number: int) -> list[IntArray]:
    """Return at most this number of padded groups, by the smallest capacity, up to this one, that needs no more."""
    low, high = int(lengths.max()), capacity
    while low < high:
        middle = (low + high) // 2
        if len(padded_groups(lengths, middle)) <= number:
            high = middle
        else:
            low = middle + 1
    return padded_groups(lengths, low)
