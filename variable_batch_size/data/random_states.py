"""What a sampler knows of the host's random numbers when a training resumes."""

from __future__ import annotations

from types import FrameType
from typing import Protocol


class RandomStates(Protocol):
    """Saved states of random number generators."""

    def set(self) -> None:
        """Set the generators to the states."""

    def keep(self) -> None:
        """Take the states that the generators have now."""


def starts_persistent_workers(caller: FrameType) -> bool:
    """Return whether the caller of `iter(sampler)` is a `DataLoader` that starts workers for all epochs to come.

    The loader does not tell its sampler: this looks at the argument `loader` of the constructor of its iterator. If
    another version of torch names it differently, the result is False.
    """
    loader = caller.f_locals.get("loader") if caller.f_code.co_name == "__init__" else None
    return bool(getattr(loader, "persistent_workers", False))
