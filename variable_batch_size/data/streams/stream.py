"""A rank's stream of rows; each step takes its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, final

import numpy as np

from variable_batch_size._validation import IntArray
from variable_batch_size.data.streams import rows


def shares(size: int, capacities: Sequence[float]) -> list[int]:
    """Return the share of each rank in a step: as near to equal ones as the capacities allow, lower ranks first.

    They sum to `size`, or to the sum of the capacities if that is less.

    >>> shares(10, [2, 10, 10]), shares(10, [10, 10, 10]), shares(10, [1, 2, 3])
    ([2, 4, 4], [4, 3, 3], [1, 2, 3])
    """
    by_rank = [0] * len(capacities)
    left = size
    for number, rank in enumerate(sorted(range(len(capacities)), key=lambda rank: (capacities[rank], -rank))):
        by_rank[rank] = int(min(capacities[rank], left // (len(capacities) - number)))
        left -= by_rank[rank]
    return by_rank


@final
class _Read(NamedTuple):
    """What was read of a stream, as one value: an interrupt finds the old one or the new one.

    Attributes:
        items: chunks of rows, without those whose rows are all used.
        counts: what each row counts, (rows,), of each of the first chunks.
        lent: the update for which rows were taken last, the first of these among all rows here, and their end.
    """

    items: list[Any]
    counts: list[IntArray]
    lent: tuple[int, int, int] = (-1, 0, 0)


@final
class Stream:
    """The rows of a stream: those that are read, and how many of them are used, which follows from the updates made.

    Args:
        items: an iterator over chunks of rows.
        counts: function of a chunk, which returns what each row counts, (rows,).
        collated: whether a chunk is a list of rows.
        kept: rows that come before those of `items`; None for none.

    Attributes:
        items: the iterator.
        ended: whether no more rows can be read.
    """

    def __init__(
        self, items: Iterator[Any], counts: Callable[[Any], IntArray], *, collated: bool, kept: Any = None
    ) -> None:
        self.items, self._counts_of, self._collated, self.ended = items, counts, collated, False
        self._read = _Read([] if kept is None else [kept], [])

    def read_until(self, size: int, update: int) -> None:
        """Read until the rows that are left for an update count `size`, or the stream ends."""
        items, counts, _ = self._read
        available = self.count_available(update)
        while available < size and not self.ended:
            items.extend(islice(self.items, 1))  # at one instant: an interrupt leaves no item that is nowhere
            self.ended = len(items) == len(counts)
            available += 0 if self.ended else int(self._count_chunk(len(counts)).sum())

    def count_available(self, update: int) -> int:
        """Return what the rows that are left for an update count."""
        return int(self._rows_left(update)[1].sum())

    def take_rows(self, size: int, update: int) -> Any:
        """Return the first rows that count at least `size`, as few as possible, for an update; None for none.

        Those of an update that was not made come again.
        """
        first, counts = self._rows_left(update)
        number = min(len(counts), int(np.searchsorted(np.cumsum(counts), size)) + 1) if size > 0 else 0
        taken = self._join_rows_of_chunks(first, first + number)
        ends = self._ends_of_chunks()
        used = int(np.searchsorted(ends, first, side="right"))  # chunks
        begin = first - (int(ends[used - 1]) if used else 0)
        items, counts_of_chunks, _ = self._read
        self._read = _Read(items[used:], counts_of_chunks[used:], (update, begin, begin + number))
        return taken

    def unused_rows(self, updates: int) -> Any:
        """Return the rows that are read and not used in this number of updates; None for none."""
        first, counts = self._rows_left(updates)
        return self._join_rows_of_chunks(first, first + len(counts))

    def _rows_left(self, update: int) -> tuple[int, IntArray]:
        """Return the first row that is left for an update, and what each row from it on counts."""
        items, counts, (lent, begin, end) = self._read
        while len(counts) < len(items):
            self._count_chunk(len(counts))
        first = begin if lent == update else end
        return first, np.concatenate([np.zeros(0, np.int64), *counts])[first:]

    def _count_chunk(self, index: int) -> IntArray:
        """Count the rows of the chunk at an index, the first one that is not counted yet, (rows,)."""
        counts = self._counts_of(self._read.items[index])
        self._read.counts.append(counts)
        return counts

    def _ends_of_chunks(self) -> IntArray:
        return np.cumsum([len(counts) for counts in self._read.counts], dtype=np.int64)

    def _join_rows_of_chunks(self, first: int, end: int) -> Any:
        """Return these rows of all that are here, in one chunk; None for none."""
        parts, begin = [], 0
        for item, stop in zip(self._read.items, self._ends_of_chunks().tolist(), strict=True):
            bounds = max(first, begin) - begin, min(end, stop) - begin
            if bounds[0] < bounds[1]:
                parts.append(item if bounds == (0, stop - begin) else self._rows_of_chunk(item, *bounds))
            begin = stop
        if not parts:
            return None
        return [row for part in parts for row in part] if self._collated else rows.join_rows(parts)

    def _rows_of_chunk(self, item: Any, begin: int, end: int) -> Any:
        return item[begin:end] if self._collated else rows.take_rows(item, np.arange(begin, end))
