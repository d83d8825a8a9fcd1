"""Random numbers of a restored run: they are set right before the loader is read."""

from __future__ import annotations

from typing import Protocol, final

from variable_batch_size.data.batches import Position


class RandomStates(Protocol):
    """Saved states of the host's random number generators."""

    def set(self) -> None:
        """Set the generators to the states."""

    def keep(self) -> None:
        """Take the states that the generators have now."""


@final
class BeforeReading:
    """States that are set right before an iteration is first read, until the next update or another epoch.

    A `DataLoader` calls `iter()` and draws its seed before it reads. A run that was saved within an epoch had drawn it
    by then.
    """

    def __init__(self) -> None:
        self._position: Position | None = None
        self._states: RandomStates | None = None

    def wait_for(self, position: Position | None, states: RandomStates) -> None:
        """Keep states of a checkpoint until a loop begins to read at a position, where `set_waiting` sets them.

        Args:
            position: the position; None: none, because the saved run had not begun to read its epoch.
            states: the states of the random number generators.
        """
        self._position, self._states = position, states

    def waits_at(self, position: Position) -> bool:
        """Return whether states are set at this position."""
        return self._states is not None and self._position == position

    def set_waiting(self, position: Position) -> None:
        """Set the generators to a checkpoint's states if these wait for this position; forget states of another one.

        A loop calls it right before it reads its first microbatch at the position.
        """
        if self._states is not None and self._position == position:
            self._states.set()
        else:
            self._states = None

    def wait_with_present(self, position: Position) -> None:
        """Let the states that the generators have now wait for this position, in the place of the saved ones.

        Starting workers draws random numbers. The saved run had drawn them before, so that this undoes it.
        """
        if self._states is not None and self._position != position:
            self._states.keep()
            self._position = position
