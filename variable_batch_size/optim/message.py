"""What the ranks sum beside the gradients of an update: entries with names, in one collective for each dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from variable_batch_size.microbatching import Microbatch


class Entry(Protocol):
    """Whatever needs a sum over the ranks in each update, as a `Stage`."""

    name: str
    by_microbatch: bool
    whole: bool

    def part(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part, which the ranks sum in place; nothing if there is none."""

    def clear(self) -> None:
        """Forget the step, after its update or to start it over."""


class Message:
    """The entries of an optimizer, and their sums in the update under way, by name."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._sums: dict[str, list[Tensor]] = {}

    def count(self, microbatch: Microbatch, like: Sequence[Tensor]) -> None:
        """Do nothing. A subclass may keep apart what the entries have measured of each microbatch."""

    def collect(self, microbatches: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that the ranks sum in place, once an update, besides the gradients: the parts of entries.

        `microbatches`: of the update, over all ranks, for a subclass. `like`: this rank's parts of the parameters.
        """
        self._sums = {entry.name: entry.part(like) for entry in self.entries}
        return [tensor for sums in self._sums.values() for tensor in sums]

    def __getitem__(self, name: str) -> list[Tensor]:
        """Return the sums of an entry over the ranks; nothing if it had no part."""
        return self._sums.get(name, [])

    def clear(self) -> None:
        """Forget the step."""
        self._sums = {}
