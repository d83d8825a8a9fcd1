"""What a training does at each time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias, final

State: TypeAlias = Literal["productive", "redone", "restarting", "saving", "idle"]


@final
class Interval(NamedTuple):
    """An interval of one state; updates, samples and progress are those that end in it."""

    begin: float
    end: float
    state: State
    nodes: int = 0  # that the training uses
    batch_size: int = 0
    updates: int = 0
    samples: int = 0
    progress: float = 0.0


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals after a merge of neighbors with the same state, nodes and batch size."""
    rows: list[Interval] = []
    for row in intervals:
        if rows and rows[-1][2:5] == row[2:5]:
            begin, *_, updates, samples, progress = rows.pop()
            sums = updates + row.updates, samples + row.samples, progress + row.progress
            row = Interval(begin, *row[1:5], *sums)
        rows.append(row)
    return rows
