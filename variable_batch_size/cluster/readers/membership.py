"""The nodes of a cluster by their names, for the formats that log who comes and who leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from variable_batch_size.cluster.readers.base import Text


@final
class Membership:
    """The names of the nodes that the cluster has; its `len` is their number."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def add(self, line: int, names: Iterable[str]) -> None:
        """Add nodes; raise ValueError if the cluster has one of them, or one is named twice."""
        for name in names:
            if name in self._names:
                remedy = "remove it before, or correct its name"
                raise self._text.error(line, "a node that is added must not be in the cluster yet", name, remedy)
            self._names.add(name)

    def remove(self, line: int, names: Iterable[str]) -> None:
        """Remove nodes; raise ValueError if the cluster does not have one of them, or one is named twice."""
        for name in names:
            self.check(line, "removed", [name])
            self._names.remove(name)

    def check(self, line: int, event: str, names: Iterable[str]) -> None:
        """Raise ValueError if the cluster does not have one of the nodes."""
        for name in names:
            if name not in self._names:
                remedy = "add it before, or correct its name"
                raise self._text.error(line, f"a node that is {event} must be in the cluster", name, remedy)
