"""What a sampler knows of the host's random numbers when a training resumes."""

from __future__ import annotations

from typing import Protocol


class RandomStates(Protocol):
    """Saved states of random number generators."""

    def set(self) -> None:
        """Set the generators to the states."""

    def keep(self) -> None:
        """Take the states that the generators have now."""
