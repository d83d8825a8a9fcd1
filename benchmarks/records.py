"""The rows of records.csv, one per measurement.

Rows of older commits were put in other words as the questions were; their figures and commands are unchanged.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

RECORDS = Path(__file__).with_name("records.csv")
RETIRED = "no longer measured"  # note of the last row of a question that no script asks any more


@dataclass(frozen=True)
class Record:
    """A row of records.csv. `question`, `what`, `on`, `where` and `case` are the same for the same measurement.

    Attributes:
        date: day of the measurement.
        question: the quantity, such as "time of an update".
        what: who is measured; "numerator / denominator" for a ratio.
        on: the model, dataset or number of samples.
        where: the device and the number of ranks, or empty.
        case: one of several in a cell of a table, such as the number of microbatches, or empty.
        value: the median, mean or only value.
        unit: "ratio", or the unit.
        low: lower quartile, or None.
        high: upper quartile, or None.
        deviation: standard deviation, or None.
        n: number of measurements (pairs of blocks, processes, runs) behind `value`, or None.
        command: what was run.
        commit: abbreviated hash of what was measured.
        versions: Python and libraries.
        note: what else is to be said, or `RETIRED`.
    """

    date: str
    question: str
    what: str
    on: str
    where: str
    case: str
    value: float
    unit: str
    low: float | None
    high: float | None
    deviation: float | None
    n: int | None
    command: str
    commit: str
    versions: str
    note: str

    def key(self) -> tuple[str, ...]:
        """Return what is measured."""
        return self.question, self.what, self.on, self.where, self.case


class Measured(NamedTuple):
    """A value with its spread, see `Record`."""

    value: float
    low: float | None = None
    high: float | None = None
    deviation: float | None = None
    n: int | None = None


def spread(values: Sequence[float]) -> Measured:
    """Return the median and the quartiles of values, such as the ratios of interleaved pairs of measurements."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return Measured(float(median), float(low), float(high), n=len(values))


def append(rows: Iterable[Record]) -> None:
    """Append rows to records.csv."""
    new = not RECORDS.exists()
    with RECORDS.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Record)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(map(asdict, rows))


def read() -> list[Record]:
    """Return all rows of records.csv, the oldest first."""
    rows = []
    with RECORDS.open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = {name: float(row[name]) if row[name] else None for name in ("low", "high", "deviation")}
            count = int(row["n"]) if row["n"] else None
            rows.append(Record(**{**row, **numbers, "value": float(row["value"]), "n": count}))
    return rows


def newest(rows: Iterable[Record]) -> list[Record]:
    """Return the newest row of each question that is still asked, in the order in which these were first asked."""
    found: dict[tuple[str, ...], Record] = {}
    for row in rows:
        found[row.key()] = row
    return [row for row in found.values() if row.note != RETIRED]
