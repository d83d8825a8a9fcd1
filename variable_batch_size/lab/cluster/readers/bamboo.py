"""Bamboo's logs: tables of the number of nodes, and nodes that come and leave."""

from __future__ import annotations

from typing import final

from variable_batch_size.lab.cluster.readers.base import (
    Membership,
    Reader,
    ReaderOptions,
    Rows,
    Text,
    is_number,
    split_cells,
)


@final
class BambooCountsReader(Reader):
    """`21529,4`, without a header: seconds since the beginning and the number of nodes from then on.

    There may be two rows at a change, before and after it: at one time the last row counts. Before the first row there
    are 0 nodes, and the trace ends at the last one. (Nothing in the files named `_scaled` of this collection says that
    their times are hours: `trace.scaled(3600)`.)

    Source: `github.com/uclasystem/bamboo`, `doc/data/` (Thorpe et al., NSDI 2023).
    """

    name = "bamboo-counts"
    example = "21529,4"
    may_be_hours = True

    def recognizes(self, text: Text) -> bool:
        """Return whether the first row is two numbers."""
        cells = split_cells(text.lines[0][1])
        return len(cells) == 2 and all(map(is_number, cells))

    def read(self, text: Text, options: ReaderOptions) -> Rows:
        """Return the time and the number of nodes of each row. The times have to be in ascending order."""
        seconds: list[float] = []
        nodes: list[int] = []
        for line, row in text.lines:
            time, count = text.cells(line, row, self.example)
            seconds.append(text.cell(line, "seconds", time))
            text.check_order(line, "seconds", seconds)
            nodes.append(int(text.cell(line, "the count", count, whole=True)))
        return Rows(seconds, nodes)


@final
class BambooEventsReader(Reader):
    """`480000,add,node1`, without a header: milliseconds since the beginning, what happens, and to which node.

    Before the first row there are 0 nodes, and the trace ends at the last one. A node that is added must not be there,
    and one that is removed must be.

    Source: `github.com/uclasystem/bamboo`, `traces/` (Thorpe et al., NSDI 2023).
    """

    name = "bamboo-events"
    example = "480000,add,node1"

    def recognizes(self, text: Text) -> bool:
        """Return whether the first row is a number, one of the two events and a name."""
        cells = split_cells(text.lines[0][1])
        return len(cells) == 3 and cells[1] in ("add", "remove") and is_number(cells[0])

    def read(self, text: Text, options: ReaderOptions) -> Rows:
        """Return the number of nodes after each event. The times have to be in ascending order."""
        seconds: list[float] = []
        nodes: list[int] = []
        members = Membership(text)
        for line, row in text.lines:
            milliseconds, event, name = text.cells(line, row, self.example)
            seconds.append(text.cell(line, "milliseconds", milliseconds) / 1000)
            text.check_order(line, "seconds", seconds)
            if not name:
                raise text.error(line, "a row must name a node", row, "correct the row")
            if event == "add":
                members.add(line, [name])
            elif event == "remove":
                members.remove(line, [name])
            else:
                raise text.error(line, "the event must be add or remove", event, "correct the row")
            nodes.append(len(members))
        return Rows(seconds, nodes)
