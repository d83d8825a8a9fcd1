"""The gradient noise of a training by its progress."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import check_number, type_error, value_error
from variable_batch_size.adaptive.scalars import read_columns
from variable_batch_size.rules.adascale import adascale_gain
from variable_batch_size.rules.base import Noise

COLUMNS = ("vbs/progress", "vbs/sigma2", "vbs/mu2")


@final
@dataclass(frozen=True, slots=True)
class NoiseCurve:
    """How the gradient noise, sigma^2 and mu^2, changes with the progress of a run: a piecewise constant function.

    The curve assumes that the noise depends on the progress alone (Qiao et al. 2021, arXiv 2008.12260, section 3). Take
    it from a run that resembles the one that you simulate.

    >>> NoiseCurve(progress=[0, 100], sigma2=[50.0, 80.0], mu2=[1.0, 0.5]).at(100).noise_scale
    160.0

    Args:
        progress: where each row begins to hold, in updates at `ref_batchsize`, strictly ascending, (rows,). The first
            row also holds before.
        sigma2: variance of the gradient of one sample, >= 0, (rows,).
        mu2: squared norm of the true gradient, >= 0, and > 0 where `sigma2` is 0, (rows,).

    Raises:
        TypeError: if a value is not a number.
        ValueError: if a value is not in its range, or the lengths differ.
    """

    progress: Sequence[float]
    sigma2: Sequence[float]
    mu2: Sequence[float]

    def __post_init__(self) -> None:
        """Check that the columns are numbers in their ranges, of equal lengths, and that the progress ascends."""
        for name in ("progress", "sigma2", "mu2"):
            try:
                values = enumerate(getattr(self, name))
            except TypeError:
                requirement = f"{name} must be a sequence of numbers"
                remedy = "pass a number for each row, such as [0]"
                raise type_error(requirement, getattr(self, name), remedy) from None
            checked = (check_number(value, f"{name}[{row}]", "correct it") for row, value in values)
            object.__setattr__(self, name, tuple(checked))
        rows = {len(self.progress), len(self.sigma2), len(self.mu2)}
        if len(rows) > 1 or 0 in rows:
            raise value_error("progress, sigma2 and mu2 must have equally many rows, at least one", rows, "pass a row")
        for row, (sigma2, mu2) in enumerate(zip(self.sigma2, self.mu2, strict=True)):
            if row and self.progress[row] <= self.progress[row - 1]:
                requirement = f"progress[{row}] must be > {self.progress[row - 1]}, the one before"
                raise value_error(requirement, self.progress[row], "sort the rows")
            if sigma2 == mu2 == 0:
                raise value_error(f"sigma2[{row}] or mu2[{row}] must be > 0", "0 and 0", "leave the row out")

    @classmethod
    def constant(cls, sigma2: float, mu2: float) -> NoiseCurve:
        """Return a curve on which the noise never changes. Its noise scale is sigma2 / mu2, in samples."""
        return cls((0.0,), (sigma2,), (mu2,))

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> NoiseCurve:
        """Read the curve that a run measured, from the `scalars.csv` of its `Tracker`.

        Rows without an estimate are dropped, and negative estimates count as 0. Of rows at one progress the last one
        counts.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it has not the columns vbs/progress, vbs/sigma2 and vbs/mu2, or no row with an estimate.
        """
        remedy = 'log a run with noise="microbatches", or with a rule that reads the noise'
        rows = list(_distinct_estimates(read_columns(path, COLUMNS, remedy).T.tolist()))
        if not rows:
            raise value_error(f"{path} must have a row with an estimate of the noise", "none", "train for longer")
        return cls(*zip(*rows, strict=True))

    def at(self, progress: float, updates: int = 0, gain: float = 1.0) -> Noise:
        """Return the gradient noise at a progress of the training.

        Args:
            progress: in updates at `ref_batchsize`.
            updates: number of updates so far, each of which gave an estimate.
            gain: AdaScale's gain of the update, see `gain`.
        """
        row = max(0, bisect_right(self.progress, progress) - 1)
        return Noise(self.sigma2[row], self.mu2[row], gain, updates)

    def gain(self, progress: float, batch_size: int, ref_batchsize: int) -> float:
        """Return how many updates at `ref_batchsize` an update of `batch_size` is worth: AdaScale's gain.

        With the variance sigma^2 and the squared norm mu^2 of the gradient at this progress, it is

            (sigma^2 / r + mu^2) / (sigma^2 / B + mu^2)

        Args:
            progress: progress of the training, in updates at `ref_batchsize`.
            batch_size: B, samples of the update.
            ref_batchsize: r, batch size at which progress is counted.
        """
        noise = self.at(progress)
        larger = max(noise.sigma2, noise.mu2)  # the gain depends on their ratio alone; nothing overflows
        return float(adascale_gain(noise.sigma2 / larger, noise.mu2 / larger, batch_size, ref_batchsize))

    def next_change(self, progress: float) -> float:
        """Return the first progress after this one from which another row holds; infinity if there is none."""
        row = max(1, bisect_right(self.progress, progress))  # the first row also holds before
        return self.progress[row] if row < len(self.progress) else math.inf


def _distinct_estimates(rows: Iterable[Sequence[float]]) -> Iterable[tuple[float, float, float]]:
    """Yield (progress, sigma2, mu2) where the noise changes, from rows of a training in any order.

    Rows with a value that is not finite are left out, and so are those in which both estimates are 0 or less. Of rows
    at one progress, the last one counts.
    """
    by_progress: dict[float, tuple[float, float]] = {}
    for progress, sigma2, mu2 in rows:
        values = max(sigma2, 0.0), max(mu2, 0.0)
        if all(map(math.isfinite, (progress, sigma2, mu2))) and any(values):
            by_progress[progress] = values
    last = None
    for progress in sorted(by_progress):
        if by_progress[progress] != last:
            last = by_progress[progress]
            yield progress, *last
