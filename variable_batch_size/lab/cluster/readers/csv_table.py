"""The project's own format: a CSV file with the columns `seconds`, `nodes` and perhaps `price`."""

from __future__ import annotations

import csv
import os
import re
from typing import final

import numpy as np

from variable_batch_size._files import written
from variable_batch_size._validation import FloatArray, IntArray
from variable_batch_size.lab.cluster.readers.base import Reader, ReaderOptions, Rows, Text, split_cells, unix_seconds
from variable_batch_size.trace.csv_file import separator_of

COLUMNS = ("seconds", "nodes", "price")
MOMENT = "2026-11-24T10:00:00Z"
TIMES = ("seconds", "time", "timestamp")  # a file needs one of these columns
DATE = re.compile("(19|20)[0-9]{2}(0[1-9]|1[0-2])[0-3][0-9]")  # as 20261124, which are no seconds


@final
class OwnReader(Reader):
    """`seconds,nodes`, with seconds since the beginning: the nodes of each row hold up to the next one.

    The trace ends at the last row. A third column `price` is that of a node, per hour; other columns are ignored.
    `CapacityTrace.to_csv` writes it. The header may have capitals, `time` or `timestamp` for `seconds`, or the names
    that `time_column` and `nodes_column` say; cells may be separated by `;` or tabs. Times may be those of ISO 8601, in
    UTC if they have no zone, or Unix times: then the trace begins at the first row.
    """

    name = "csv"
    example = "seconds,nodes"
    options = frozenset({"time_column", "nodes_column"})
    may_be_hours = True

    def recognizes(self, text: Text) -> bool:
        """Return whether a file is a CSV table with a column `nodes`, and one of `seconds`, `time` and `timestamp`."""
        _, first_line = text.lines[0]  # with its number
        begins_otherwise = first_line[0] in "[{#"  # JSON, or a comment of another format
        header, _ = _split_header(first_line)
        return not begins_otherwise and "nodes" in header and any(name in header for name in TIMES)

    def read(self, text: Text, options: ReaderOptions) -> Rows:
        """Return the time, the number of nodes and, if known, the price of each row. The times have to ascend."""
        line, first = text.lines[0]
        header, separator = _split_header(first)
        time = options.time_column.lower() or next((name for name in TIMES if name in header), TIMES[0])
        nodes = options.nodes_column.lower() or "nodes"
        for name in (time, nodes):
            if header.count(name) != 1:
                remedy = "rename a column, or pass time_column= (--time-column) and nodes_column= (--nodes-column)"
                raise text.error(line, f"the header must have one column {name}", first, remedy)
        if time == nodes:
            remedy = "pass another time_column= (--time-column) or nodes_column= (--nodes-column)"
            raise text.error(line, "times and nodes must be two columns", time, remedy)
        table: dict[str, list[float]] = {name: [] for name in (time, nodes, *({"price"} & {*header}))}
        if len(text.lines) == 1:
            raise text.error(line, "there must be at least one row", first, "add rows")
        first_time = dict(zip(header, split_cells(text.lines[1][1], separator), strict=False)).get(time, "")
        start = unix_seconds(first_time)
        dated = start is not None or DATE.fullmatch(first_time) is not None
        for line, row in text.lines[1:]:
            for name, cell in zip(header, text.cells(line, row, first, separator), strict=True):
                if name == time and (dated or ":" in cell):
                    requirement = f"{name} must be seconds, or in each row a time of ISO 8601 such as {MOMENT}"
                    moment = text.moment(line, requirement, cell, "add the date, or correct it")
                    table[name].append(moment - (start or 0.0))
                elif name in table:
                    table[name].append(text.cell(line, name, cell, whole=name == nodes))
            text.check_order(line, time, table[time])
        return Rows(table[time], list(map(int, table[nodes])), prices=table.get("price"))


def _split_header(row: str) -> tuple[list[str], str]:
    """Return the names of the columns of a CSV header in lower case, and the separator of its cells."""
    separator = separator_of(row)
    return [cell.lower() for cell in split_cells(row, separator)], separator


def read_csv(path: str | os.PathLike[str]) -> Rows:
    """Read a CSV file with the columns `seconds`, `nodes` and perhaps `price`.

    Raises:
        OSError: if it cannot be read.
        LogError: if it has another format or is damaged.
    """
    return OwnReader().read_checked(Text.load(path), ReaderOptions())


def write_csv(path: str | os.PathLike[str], seconds: FloatArray, nodes: IntArray, prices: FloatArray | None) -> None:
    """Write a capacity trace as a CSV file atomically: a failure leaves the old file as it was.

    Args:
        path: the file; an existing one is replaced.
        seconds: times of the rows, and the end, (rows + 1,).
        nodes: number of nodes from each time on, (rows,).
        prices: price of a node-hour from each time on, (rows,); None if not known.
    """
    columns = [seconds, np.append(nodes, nodes[-1])]
    columns += [] if prices is None else [np.append(prices, prices[-1])]
    rows = zip(*([_shortest_text(value) for value in column.tolist()] for column in columns), strict=True)
    with written(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS[: len(columns)], *rows])


def _shortest_text(number: float) -> str:
    """Return a number as text that reads back as the same number, without ".0" if it is whole."""
    return str(int(number)) if float(number).is_integer() else repr(number)
