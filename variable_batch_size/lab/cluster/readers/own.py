"""The project's own format: a CSV file with the columns `seconds`, `nodes` and perhaps `price`."""

from __future__ import annotations

import csv
import os
import re
from datetime import datetime, timezone
from typing import final

import numpy as np

from variable_batch_size._files import written
from variable_batch_size._validation import FloatArray, IntArray
from variable_batch_size.lab.cluster.readers.base import Options, Reader, Rows, Text, split

COLUMNS = ("seconds", "nodes", "price")
TIMES = ("seconds", "time")  # a file needs one of these columns
MOMENT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?(Z|[+-][0-9]{2}:[0-9]{2})?"
)


@final
class OwnReader(Reader):
    """`seconds,nodes`, with seconds since the beginning: the nodes of each row hold up to the next one.

    The trace ends at the last row. A third column `price` is that of a node, per hour. `CapacityTrace.to_csv` writes
    it. The header may have capitals, and `time` for `seconds`; cells may be separated by `;` or tabs. Times may be
    those of ISO 8601, in UTC if they have no zone: then the trace begins at the first row.
    """

    name = "csv"
    example = "seconds,nodes"

    def recognizes(self, text: Text) -> bool:
        """Return whether the header has the columns `seconds` or `time`, and `nodes`."""
        first = text.lines[0][1]
        header, _ = _header(first)
        return first[0] not in "[{#" and "nodes" in header and any(name in header for name in TIMES)

    def read(self, text: Text, options: Options) -> Rows:
        """Return the rows; their times have to be in ascending order."""
        line, first = text.lines[0]
        header, separator = _header(first)
        time = next((name for name in TIMES if name in header), TIMES[0])
        table: dict[str, list[float]] = {name: [] for name in header if name in (time, *COLUMNS[1:])}
        if not (self.recognizes(text) and all(header.count(name) == 1 for name in table)):
            raise text.error(line, "the header must be seconds,nodes or seconds,nodes,price", first, "correct it")
        if len(text.lines) == 1:
            raise text.error(line, "there must be at least one row", first, "add rows")
        start: datetime | None = None
        for line, row in text.lines[1:]:
            for name, cell in zip(header, text.cells(line, row, first, separator), strict=True):
                if name == time and (start or (not table[time] and re.match("[0-9]{4}-", cell))):
                    moment = _moment(text, line, name, cell)
                    start = start or moment
                    table[name].append((moment - start).total_seconds())
                elif name in table:
                    table[name].append(text.cell(line, name, cell, whole=name == "nodes"))
            text.check_order(line, time, table[time])
        return Rows(table[time], list(map(int, table["nodes"])), prices=table.get("price"))


def _header(row: str) -> tuple[list[str], str]:
    """Return the names of the columns in lower case, and their separator."""
    separator = next((character for character in ";\t" if character in row), ",")
    return [cell.lower() for cell in split(row, separator)], separator


def _moment(text: Text, line: int, name: str, cell: str) -> datetime:
    try:
        if MOMENT.fullmatch(cell):  # fromisoformat reads more than these, and Z only since Python 3.11
            moment = datetime.fromisoformat(cell.replace("Z", "+00:00"))
            return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    except ValueError:  # such as for February 30
        pass
    requirement = f"{name} must be a time such as 2026-11-24T10:00:00Z, as that of the first row"
    raise text.error(line, requirement, cell, "correct it")


def read_csv(path: str | os.PathLike[str]) -> Rows:
    """Return the rows of a file in this format.

    Raises:
        OSError: if it cannot be read.
        LogError: if it has another format or is damaged.
    """
    return OwnReader().read_checked(Text.load(path), Options())


def write_csv(
    path: str | os.PathLike[str],
    seconds: FloatArray,
    nodes: IntArray,
    prices: FloatArray | None,
) -> None:
    """Write a trace atomically: a failure leaves the old file as it was.

    Args:
        path: the file; an existing one is replaced.
        seconds: times of the rows, and the end, (rows + 1,).
        nodes: (rows,).
        prices: (rows,), or None.
    """
    columns = [seconds, np.append(nodes, nodes[-1])]
    columns += [] if prices is None else [np.append(prices, prices[-1])]
    rows = zip(*([_shortest(value) for value in column.tolist()] for column in columns), strict=True)
    with written(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS[: len(columns)], *rows])


def _shortest(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else repr(number)
