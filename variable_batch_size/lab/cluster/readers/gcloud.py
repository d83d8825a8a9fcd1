"""Bamboo's logs of Google Cloud: a date, a time of day and the number of nodes."""

from __future__ import annotations

import re
import warnings
from datetime import datetime
from itertools import pairwise
from typing import Final, final

from variable_batch_size.lab.cluster.readers.base import Reader, ReaderOptions, Rows, Text, split_cells

DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
TIME: Final = re.compile(r"[0-9]{2}:[0-9]{2}:[0-9]{2}")


@final
class GcloudReader(Reader):
    """`2021-12-10, 13:07:45, 80`, without a header: date, time of day and the number of nodes from then on.

    The trace begins at the earliest row and ends at the latest one. Rows that go back in time are counted in a warning,
    and all rows are sorted by time; rows at one time stay in the order of the file, and the last one counts. Every day
    has 24 hours: the hour that a clock repeats at the end of summer time looks like rows that go back.

    In a gap the number of the row before it holds, with `max_gap` for at most this time: then there are 0 nodes until
    the next row.

    Source: `github.com/uclasystem/bamboo`, `traces/gcloud/` (Thorpe et al., NSDI 2023).
    """

    name = "gcloud"
    example = "2021-12-10, 13:07:45, 80"
    options = frozenset({"max_gap"})

    def recognizes(self, text: Text) -> bool:
        """Return whether the first row begins with a date and what could be a time of day."""
        cells = split_cells(text.lines[0][1])
        return len(cells) == 3 and DATE.fullmatch(cells[0]) is not None and ":" in cells[1]

    def read(self, text: Text, options: ReaderOptions) -> Rows:
        """Return the time and the number of nodes of each row, sorted by time. Warn if they were not."""
        rows: list[tuple[datetime, int]] = []
        for line, row in text.lines:
            date, time, count = text.cells(line, row, self.example)
            rows.append((_parse_moment(text, line, date, time), int(text.cell(line, "the count", count, whole=True))))
        backwards = sum(later < earlier for (earlier, _), (later, _) in pairwise(rows))
        if backwards:
            message = (
                f"capacity trace ({text.path}) must be in ascending order of time, got {backwards} of {len(rows)} rows "
                f"that go back; sorted them by time, sort the file to avoid this warning"
            )
            warnings.warn(message, stacklevel=4)  # the line that calls cluster.read
        rows.sort(key=lambda row: row[0])  # stably
        seconds = [(moment - rows[0][0]).total_seconds() for moment, _ in rows]
        nodes = [number for _, number in rows]
        return Rows(seconds, nodes) if options.max_gap is None else _fill_gaps(seconds, nodes, options.max_gap)


def _parse_moment(text: Text, line: int, date: str, time: str) -> datetime:
    """Return the date and the time of day of a row as one object. Raise LogError if the cells do not have them."""
    try:
        if DATE.fullmatch(date) and TIME.fullmatch(time):  # fromisoformat reads more than these
            return datetime.fromisoformat(f"{date} {time}")
    except ValueError:  # such as for February 30
        pass
    requirement = "a row must begin with a date and a time of day, such as 2021-12-10, 13:07:45"
    raise text.error(line, requirement, f"{date}, {time}", "correct the row")


def _fill_gaps(seconds: list[float], nodes: list[int], max_gap: float) -> Rows:
    """Return the rows of a trace, in which nodes count as gone `max_gap` seconds after a row if the next one is later.

    Args:
        seconds: time of each row, (rows,), ascending.
        nodes: number of nodes from each time on, (rows,).
        max_gap: seconds for which a row holds at most.
    """
    filled = Rows([], [])
    for second, count, next_second in zip(seconds, nodes, [*seconds[1:], seconds[-1]], strict=True):
        filled.seconds.append(second)
        filled.nodes.append(count)
        if next_second - second > max_gap:
            filled.seconds.append(second + max_gap)
            filled.nodes.append(0)
    return filled
