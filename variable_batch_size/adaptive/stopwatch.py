"""How long updates take, measured on the host while a training runs."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, final

from variable_batch_size.adaptive.throughput import Throughput

_KEPT = 31  # durations of a kind of update that stay; their median leaves out evaluations and saves between two updates
_LEAST = 3  # updates of a kind that are needed: a single one may include a save or a compilation
_KINDS = 64  # kinds of updates that stay: those that were made last


@final
class UpdateStopwatch:
    """Measures the seconds from the end of an update to the end of the next one, for each kind of update.

    A kind is a number of devices, rows of the largest microbatch, and rounds: microbatches of the slowest device. The
    host is as fast as the device on average, so that the median is the time of the device. The first update of a run is
    left out: it includes one-time setup.

    Args:
        clock: returns seconds that never decrease.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without measurements: seconds by devices, rows of the largest microbatch, and rounds."""
        self._clock = clock
        self._seconds: dict[tuple[int, int, int], deque[float]] = {}
        self._last: float | None = None  # when the last update ended

    def after_update(self, devices: int, rows: int, rounds: int) -> None:
        """Record the duration of the update that just ended.

        Args:
            devices: number of devices.
            rows: rows of its largest microbatch.
            rounds: microbatches of the slowest device.
        """
        now = self._clock()
        if self._last is not None:
            kind = devices, rows, rounds
            durations = self._seconds.pop(kind, None) or deque(maxlen=_KEPT)
            durations.append(now - self._last)
            self._seconds[kind] = durations  # at the end: the first kind is the one that was not made for longest
            if len(self._seconds) > _KINDS:
                del self._seconds[next(iter(self._seconds))]
        self._last = now

    def throughput(self) -> Throughput | None:
        """Return the model of an update's seconds that fits the medians; None if too few are known, or none fits.

        There must be two kinds with at least `_LEAST` updates that differ in rows or rounds: kinds that differ only in
        the number of devices say nothing about other batch sizes.
        """
        measured = list[tuple[int, int, int, float]]()
        for (devices, rows, rounds), durations in self._seconds.items():
            if len(durations) >= _LEAST and (median := statistics.median(durations)) > 0:
                measured.append((devices, rows, rounds, median))
        if len({(rows, rounds) for _, rows, rounds, _ in measured}) < 2:
            return None
        try:
            return Throughput.fit(measured)
        except ValueError:  # noise hides that more rounds take longer
            return None

    def state_dict(self) -> dict[str, Any]:
        """Return the measured seconds of each kind, as plain numbers."""
        return {"seconds": [[*kind, list(seconds)] for kind, seconds in self._seconds.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the measurements of an earlier run."""
        self._last = None
        self._seconds = {(*kind,): deque(seconds, maxlen=_KEPT) for *kind, seconds in state["seconds"]}
