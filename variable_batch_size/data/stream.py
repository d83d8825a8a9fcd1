"""A rank's stream of rows, of which each step takes its part."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from variable_batch_size._validation import IntArray
from variable_batch_size.data import rows


def shares(size: int, capacities: Sequence[float]) -> list[int]:
    """Return the share of each rank in a step: as near to equal ones as the capacities allow, lower ranks first.

    They sum to `size`, or to the sum of the capacities if that is less.

    >>> shares(10, [2, 10, 10]), shares(10, [10, 10, 10]), shares(10, [1, 2, 3])
    ([2, 4, 4], [4, 3, 3], [1, 2, 3])
    """
    found, left = [0] * len(capacities), size
    for number, rank in enumerate(sorted(range(len(capacities)), key=lambda rank: (capacities[rank], -rank))):
        found[rank] = int(min(capacities[rank], left // (len(capacities) - number)))
        left -= found[rank]
    return found


class _Chunk(NamedTuple):
    batch: Any
    counts: IntArray  # (rows,): of rows that are left


@final
class Stream:
    """The rows of a stream that are read and not taken.

    Args:
        items: an iterator over chunks of rows.
        counts: function of a chunk, which returns what each row counts, (rows,).
        collated: whether a chunk is a list of rows.
        kept: rows that come before those of `items`; None for none.

    Attributes:
        items: the iterator.
        available: what the rows count.
        ended: whether no more rows can be read.
    """

    def __init__(
        self, items: Iterator[Any], counts: Callable[[Any], IntArray], *, collated: bool, kept: Any = None
    ) -> None:
        self.items, self._counts, self._collated = items, counts, collated
        self._chunks = deque[_Chunk]()
        self._lent: tuple[int, Any] = (-1, None)  # the update for which rows were taken last, and these
        self.available, self.ended = 0, False
        if kept is not None:
            self._add(kept)

    def _add(self, batch: Any) -> None:
        chunk = _Chunk(batch, self._counts(batch))
        if len(chunk.counts):
            self._chunks.append(chunk)
            self.available += int(chunk.counts.sum())

    def fill(self, size: int) -> None:
        """Read until the rows count `size`, or the stream ends."""
        while self.available < size and not self.ended:
            try:
                item = next(self.items)
            except StopIteration:
                self.ended = True
            else:
                self._add(item)

    def take(self, size: int, update: int) -> Any:
        """Return the first rows that count at least `size`, as few as possible, for an update; None for none."""
        parts = []
        while size > 0 and self._chunks:
            batch, counts = self._chunks.popleft()
            number = min(len(counts), int(np.searchsorted(np.cumsum(counts), size)) + 1)
            taken = int(counts[:number].sum())
            size, self.available = size - taken, self.available - taken
            if number < len(counts):
                self._chunks.appendleft(_Chunk(self._part(batch, number, len(counts)), counts[number:]))
                batch = self._part(batch, 0, number)
            parts.append(batch)
        self._lent = update, self._joined(parts)
        return self._lent[1]

    def take_back(self, updates: int) -> None:
        """Take back the rows of an update that was not made, after this number of updates."""
        update, batch = self._lent
        self._lent = (-1, None)
        if update == updates and batch is not None:
            self._add(batch)
            self._chunks.rotate(1)  # before the others

    def kept(self, updates: int) -> Any:
        """Return the rows that are read and not used in this number of updates; None for none."""
        update, batch = self._lent
        lent = [batch] if update == updates and batch is not None else []
        return self._joined([*lent, *(chunk.batch for chunk in self._chunks)])

    def _part(self, batch: Any, begin: int, end: int) -> Any:
        return batch[begin:end] if self._collated else rows.take(batch, np.arange(begin, end))

    def _joined(self, parts: list[Any]) -> Any:
        if not parts:
            return None
        return [row for part in parts for row in part] if self._collated else rows.join(parts)
