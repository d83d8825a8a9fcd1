"""Times that differ by rounding only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

ROUNDING = 1e-12  # relative to a time or a progress: sums of floats differ from the true ones by less


def snapped(time: float, events: Sequence[float]) -> float:
    """Return the event, of times in ascending order, that a time is equal to up to rounding; or else the time.

    >>> snapped(0.1 + 0.2, [0.1, 0.3]), snapped(0.2, [0.1, 0.3])
    (0.3, 0.2)
    """
    row = bisect_left(events, time)
    return next((event for event in events[max(0, row - 1) : row + 1] if abs(time - event) <= ROUNDING * time), time)


def reached(now: float, time: float) -> bool:
    """Return whether a time has come, up to rounding."""
    return now >= time * (1 - ROUNDING)
