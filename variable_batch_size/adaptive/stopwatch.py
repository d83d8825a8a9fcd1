"""How long updates take, measured on the host while a training runs."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, final

from variable_batch_size.adaptive.throughput import Throughput

_KEPT = 31  # seconds of a kind of update: their median leaves out evaluations and saves between two updates
_LEAST = 3  # updates of a kind: a single one may include a save or a compilation
_KINDS = 64  # of updates: those that were made last


@final
class UpdateStopwatch:
    """Measures the seconds from the end of an update to that of the next one, by devices, rows and rounds.

    Host and device agree on average, so that the median is that of the device. The first update of a run is dropped:
    it includes one-time setup.

    Args:
        clock: returns seconds, which never fall.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[tuple[int, int, int], deque[float]] = {}
        self._last: float | None = None

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
            of_kind = self._seconds.pop(kind, None) or deque(maxlen=_KEPT)
            of_kind.append(now - self._last)
            self._seconds[kind] = of_kind  # as the last one
            if len(self._seconds) > _KINDS:
                del self._seconds[next(iter(self._seconds))]
        self._last = now

    def throughput(self) -> Throughput | None:
        """Return the model that is closest to the medians; None if no model fits, or updates of two kinds are missing.

        A kind counts with its third update. Two kinds differ in rows or rounds: updates that differ only in the
        number of devices say nothing about other batch sizes.
        """
        counted = {kind: seconds for kind, seconds in self._seconds.items() if len(seconds) >= _LEAST}
        medians = [(*kind, statistics.median(seconds)) for kind, seconds in counted.items()]
        measured = [row for row in medians if row[-1] > 0]
        if len({row[1:3] for row in measured}) < 2:
            return None
        try:
            return Throughput.fit(measured)
        except ValueError:  # noise hides that more rounds take longer
            return None

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured, as plain numbers."""
        return {"seconds": [[*kind, list(seconds)] for kind, seconds in self._seconds.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what an earlier run has measured."""
        self._last = None
        self._seconds = {(*kind,): deque(seconds, maxlen=_KEPT) for *kind, seconds in state["seconds"]}
