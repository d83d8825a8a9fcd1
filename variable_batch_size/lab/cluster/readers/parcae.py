"""Parcae's traces: JSON lines of nodes that come and go."""

from __future__ import annotations

import re
from typing import Final, final

from variable_batch_size.lab.cluster.readers.base import Membership, Reader, ReaderOptions, Rows, Text, json_values

EVENTS: Final = ("add", "remove", "migration", "no-op")


@final
class ParcaeReader(Reader):
    """`[360000, "add", {"nodes": ["node-27"], "duration": 60000}]`: milliseconds since the beginning, event, nodes.

    Before the first row there are 0 nodes. The trace ends at the last row plus its `duration`, in milliseconds; a row
    holds up to the next one, whatever its own duration. `add` and `remove` change the nodes, each of which is added
    once before it is removed. `migration` and `no-op` do not change them; the nodes that they name, if any, must be
    there. Other keys are ignored, and so are lines that begin with `#`.

    Source: `github.com/JF-D/Parcae`, `aws/traces/` (Duan et al., NSDI 2024).
    """

    name = "parcae"
    example = '[0, "add", {"nodes": ["node-0"], "duration": 60000}]'

    def recognizes(self, text: Text) -> bool:
        """Return whether the first text that is no comment begins a list with a number."""
        return re.match(r"\s*\[\s*[-0-9]", _without_comments(text)) is not None

    def read(self, text: Text, options: ReaderOptions) -> Rows:
        """Return the number of nodes after each event. The times have to be in ascending order."""
        seconds: list[float] = []
        nodes: list[int] = []
        duration = 0.0
        members = Membership(text)
        for line, row in json_values(text, _without_comments(text)):
            milliseconds, event, names, length = self._fields(text, line, row)
            seconds.append(text.number(line, "milliseconds", milliseconds) / 1000)
            text.check_order(line, "seconds", seconds)
            duration = text.number(line, "duration", length) / 1000
            if event == "add":
                members.add(line, names)
            elif event == "remove":
                members.remove(line, names)
            else:
                members.check(line, "named", names)
            nodes.append(len(members))
        if not seconds:
            raise text.error(text.lines[-1][0], "there must be at least one row", text.lines[-1][1], "add rows")
        return Rows(seconds, nodes, seconds[-1] + duration)

    def _fields(self, text: Text, line: int, entry: object) -> tuple[object, object, list[str], object]:
        """Return milliseconds, event, names of nodes and duration of a row; raise LogError if it has another form."""
        if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict)):
            requirement = f"a row must have the form {self.example}"
            raise text.error(line, requirement, dict(text.lines)[line], "correct the row")
        milliseconds, event, details = entry
        if event not in EVENTS:
            raise text.error(line, f"the event must be one of {', '.join(EVENTS)}", event, "correct the row")
        names = details.get("nodes")
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise text.error(line, "nodes must be a list of names", names, "correct the row")
        return milliseconds, event, names, details.get("duration")


def _without_comments(text: Text) -> str:
    """Return the text of a file with its comment lines emptied, so that the numbers of the other lines stay."""
    return re.sub(r"(?m)^[^\S\n]*#.*", "", text.content)
