"""The project's own format: a CSV file with the columns `seconds`, `nodes` and perhaps `price`."""

from __future__ import annotations

import csv
import os
from typing import final

import numpy as np

from variable_batch_size._files import written
from variable_batch_size._validation import FloatArray, IntArray
from variable_batch_size.cluster.readers.base import Options, Reader, Rows, Text, split

COLUMNS = ("seconds", "nodes", "price")


@final
class OwnReader(Reader):
    """`seconds,nodes`, with seconds since the beginning: the nodes of each row hold up to the next one.

    The trace ends at the last row. A third column `price` is that of a node, per hour. `CapacityTrace.to_csv` writes
    it.
    """

    name = "csv"
    example = "seconds,nodes"

    def recognizes(self, text: Text) -> bool:
        """Return whether the header has the columns `seconds` and `nodes`."""
        header = text.lines[0][1]
        return header[0] not in "[{#" and set(COLUMNS[:2]) <= set(split(header))

    def read(self, text: Text, options: Options) -> Rows:
        """Return the rows; their times have to be in ascending order."""
        line, first = text.lines[0]
        header = split(first)
        if not (self.recognizes(text) and len(set(header)) == len(header)):
            raise text.error(line, "the header must be seconds,nodes or seconds,nodes,price", first, "correct it")
        if len(text.lines) == 1:
            raise text.error(line, "there must be at least one row", first, "add rows")
        table: dict[str, list[float]] = {name: [] for name in header if name in COLUMNS}
        for line, row in text.lines[1:]:
            for name, cell in zip(header, text.cells(line, row, first), strict=True):
                if name in table:
                    table[name].append(text.cell(line, name, cell, whole=name == "nodes"))
            text.check_order(line, "seconds", table["seconds"])
        return Rows(table["seconds"], list(map(int, table["nodes"])), prices=table.get("price"))


def read_csv(path: str | os.PathLike[str]) -> Rows:
    """Return the rows of a file in this format.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it has another format or is damaged.
    """
    return OwnReader().checked(Text.load(path), Options())


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
    """Format a number so that it is read back exactly; a whole one without a point."""
    return str(int(number)) if float(number).is_integer() else repr(number)
