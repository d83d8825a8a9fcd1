"""Equal updates one after another, counted without a loop."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import final

from variable_batch_size._validation import MAX_INT


@final
class Course:
    """The next updates of a training whose batch size does not change: their seconds, samples and progress.

    The last update of an epoch is shortened to what is left of the dataset, as `Plan` does. Each method returns what
    the first n updates make, n >= 0, in closed form: the updates of full size, the one that ends the epoch under way,
    and those that end later epochs, which are equal.

    Args:
        size: the batch size, in samples.
        dataset_size: samples of an epoch, >= `size`; None: there are no epochs.
        used: samples of the epoch under way that were used before.
        seconds: the seconds of an update, by its samples.
        progress: the progress that it makes, by its samples.
    """

    def __init__(
        self,
        size: int,
        dataset_size: int | None,
        used: int,
        seconds: Callable[[int], float],
        progress: Callable[[int], float],
    ) -> None:
        self._dataset_size, self._used = dataset_size, used
        self._first, self._epoch = 2 * MAX_INT, 1  # updates of the epoch under way, and of each later one
        tail = last = size
        if dataset_size is not None:
            self._first, self._epoch = -(-(dataset_size - used) // size), -(-dataset_size // size)
            tail = dataset_size - used - (self._first - 1) * size
            last = dataset_size - (self._epoch - 1) * size
        self._sizes = size, tail, last
        self._seconds_of = tuple(map(seconds, self._sizes))
        self._progress_of = tuple(map(progress, self._sizes))

    def seconds(self, updates: int) -> float:
        """Return the seconds of the first `updates` updates."""
        full, tails, lasts = self._counts(updates)
        each = self._seconds_of
        return full * each[0] + tails * each[1] + lasts * each[2]

    def updates(self, updates: int) -> int:
        """Return their number."""
        return updates

    def samples(self, updates: int) -> int:
        """Return their samples."""
        full, tails, lasts = self._counts(updates)
        each = self._sizes
        return full * each[0] + tails * each[1] + lasts * each[2]

    def progress(self, updates: int) -> float:
        """Return their progress."""
        full, tails, lasts = self._counts(updates)
        each = self._progress_of
        return full * each[0] + tails * each[1] + lasts * each[2]

    def used(self, updates: int) -> int:
        """Return the samples of the epoch then under way that are used after them."""
        return 0 if self._dataset_size is None else (self._used + self.samples(updates)) % self._dataset_size

    def ended_by(self, begin: float, end: float) -> int:
        """Return how many updates end by the time `end`, if the first one begins at `begin`."""
        most = int(min((end - begin) / min(self._seconds_of), MAX_INT)) + 2
        return bisect_right(range(1, most), end, key=lambda n: begin + self.seconds(n))

    def until(self, total: Callable[[int], float], value: float, most: int) -> int:
        """Return the least number of updates n >= 1 with total(n) >= value; `most` if that is less."""
        return most if total(most) < value else bisect_left(range(1, most), value, key=total) + 1

    def _counts(self, updates: int) -> tuple[int, int, int]:
        """Return how many of the first `updates` have the full size, end the epoch under way, and end later ones."""
        if updates < self._first:
            return updates, 0, 0
        lasts = (updates - self._first) // self._epoch
        return updates - 1 - lasts, 1, lasts
