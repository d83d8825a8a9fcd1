"""The batch size with the most progress a second."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from variable_batch_size._validation import IntArray, check_bounds, check_number
from variable_batch_size.adaptive.base import ControlInput
from variable_batch_size.adaptive.noise_scale import keep_batch_size, required_noise
from variable_batch_size.rules.adascale import adascale_gain

CANDIDATES = 50  # sizes of the geometric grid: as many as Pollux's implementation, AdaptDL, tries


@final
@dataclass(frozen=True, slots=True)
class Goodput:
    """Controller with the largest goodput that is predicted: throughput times efficiency.

        goodput(B) = B / T(B) * gain(B) / k,   k = B / ref,   gain(B) = (sigma^2 / ref + mu^2) / (sigma^2 / B + mu^2)

    T(B) are the seconds of an update on the devices that are there, with the microbatch that is given. The reference
    multiplies the goodput of all batch sizes by the same factor, so that none is needed. The candidates are a geometric
    grid with both bounds, the next larger sizes that leave no device idle, and the present one. It changes the batch
    size only for a goodput that is higher by more than `threshold`; of equal ones it takes the smaller batch.

    The batch size stays what it is, within the bounds, while the noise is not known. If the noise is known and the
    throughput is not, the batch size doubles at each question, and at the upper bound it halves. These updates have
    different batch sizes, from which the controller learns T(B). Pollux also explores in this way, but with different
    numbers of devices, at most twice as many as before.

    Use when: time counts, communication takes much of it, and the rule of the learning rate is AdaScale.
    Fails when: the gain does not predict what larger batches are worth, as in language models (see `NoiseScale`), the
    throughput was measured at other batch sizes and devices, or all batch sizes that are allowed, also by the bounds of
    an `AdaptiveTrace`, give a device the same number of microbatches of the same size, so that T(B) is never learned.
    Source: Qiao et al. 2021, arXiv 2008.12260, sections 3 and 4.1.

    >>> from variable_batch_size.rules.base import Noise
    >>> from variable_batch_size.adaptive.throughput import Throughput
    >>> model = Throughput.simple(samples_per_second=100, communication_seconds=1)
    >>> Goodput(bounds=(100, 900))(ControlInput(4, 100, noise=Noise(sigma2=900.0, mu2=1.0), throughput=model))
    604

    Args:
        bounds: least and largest batch size, in samples.
        threshold: least relative increase of the goodput for which the batch size changes, >= 0.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if it is not in its range.
    """

    bounds: tuple[int, int]
    threshold: float = 0.05

    needs_noise: ClassVar[bool] = True
    needs_throughput: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", check_bounds(self.bounds))
        object.__setattr__(self, "threshold", check_number(self.threshold, "threshold", "pass 0.05 for 5 percent"))

    def __call__(self, input: ControlInput, /) -> int:
        """Return the batch size with the most progress per second, or the present one if it is nearly as good.

        The progress of an update follows from the gradient noise, and its time from the measured throughput. While
        only the noise is known, return a size that is not measured yet; while it is unknown, keep the present size.

        Raises:
            ValueError: if the noise is not measured, or too little is known and there is no batch size to keep.
        """
        noise = required_noise(self, input)
        model = input.throughput
        sigma2, mu2 = max(noise.sigma2, 0.0), max(noise.mu2, 0.0)  # nan stays nan: 0.0 is not larger
        largest = max(sigma2, mu2)
        has_noise = math.isfinite(sigma2) and math.isfinite(mu2) and largest > 0
        if model is None or not has_noise:
            present_size = keep_batch_size(self, input)
            return self._limit(self._explored_size(present_size) if has_noise else present_size)

        sizes = self.candidates(input)
        # The gain depends on the ratio of the two only; divided by the larger one, no number overflows.
        gains = adascale_gain(sigma2 / largest, mu2 / largest, sizes, 1)  # (sizes,), relative to one sample
        cut = {"spread": False, "fixed_shape": input.fixed_shape}  # a training that measures noise does not spread
        seconds = model.of_sizes(sizes, input.devices, input.minibatch_size, **cut)
        costs = seconds / gains  # (sizes,), seconds for the progress of an update of one sample
        best = int(np.argmin(costs))  # the first one: the smallest size of those with equal costs
        keeps = (sizes == input.batch_size) & (costs <= (1 + self.threshold) * costs[best])  # (sizes,), at most one
        return int(sizes[keeps.argmax() if keeps.any() else best])

    def _limit(self, size: int) -> int:
        """Return the size within the bounds that is nearest to `size`."""
        return min(max(size, self.bounds[0]), self.bounds[1])

    def _explored_size(self, present: int) -> int:
        """Return another batch size than the present one, by whose updates a training learns how long updates take.

        It is twice the present one, and at the upper bound half of that bound, so that the sizes begin to grow again.
        """
        return 2 * present if present < self.bounds[1] else self.bounds[1] // 2

    def candidates(self, input: ControlInput) -> IntArray:
        """Return the batch sizes that are compared, in ascending order, (sizes,)."""
        low, high = self.bounds
        # From `low` to `high` with a constant ratio of one size to the next.
        grid = {round(low * (high / low) ** (index / (CANDIDATES - 1))) for index in range(CANDIDATES)} | {low, high}
        full_sizes = {-(-size // unit) * unit for size in grid for unit in _units(input)}  # rounded up to multiples
        present_size = low if input.batch_size is None else input.batch_size
        return np.array(sorted(size for size in grid | full_sizes | {present_size} if low <= size <= high))


def _units(input: ControlInput) -> tuple[int, ...]:
    """Return the numbers of samples whose multiples fill microbatches, or occupy all devices equally."""
    rows = input.minibatch_size
    return (input.devices,) if rows is None else (rows, input.devices * rows)
