"""The batch size with the most progress a second."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from variable_batch_size._validation import check_bounds, check_number
from variable_batch_size.adaptive.base import ControlInput, required_noise, unchanged
from variable_batch_size.rules.adascale import adascale_gain

CANDIDATES = 50  # as many as Pollux's implementation, AdaptDL, tries


@final
@dataclass(frozen=True, slots=True)
class Goodput:
    """Controller with the largest goodput that is predicted: throughput times efficiency.

        goodput(B) = B / T(B) * gain(B) / k,   k = B / ref,   gain(B) = (sigma^2 / ref + mu^2) / (sigma^2 / B + mu^2)

    T(B) are the seconds of an update on the devices that are there, with the microbatch that is given. The reference
    multiplies the goodput of all batch sizes by the same factor, so that none is needed. The candidates are a geometric
    grid with both bounds and the present batch size. It changes the batch size only for a goodput that is higher by
    more than `threshold`; of equal ones it takes the smaller batch.

    The batch size stays what it is, within the bounds, while noise or throughput are not known. Pollux explores then:
    it tries other numbers of devices, at most twice as many as before. Here that belongs to whoever measures the
    throughput.

    Use when: time counts, communication takes much of it, and the rule of the learning rate is AdaScale.
    Fails when: the gain does not predict what larger batches are worth, as in language models (see `NoiseScale`), or
    the throughput was measured at other batch sizes and devices.
    Source: Qiao et al. 2021, arXiv 2008.12260, sections 3 and 4.1.

    >>> from variable_batch_size.rules.base import Noise
    >>> from variable_batch_size.adaptive.throughput import Throughput
    >>> model = Throughput.simple(samples_per_second=100, communication_seconds=1)
    >>> Goodput(bounds=(100, 900))(ControlInput(4, 100, noise=Noise(sigma2=900.0, mu2=1.0), throughput=model))
    575

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
        """Return the best candidate, or the present batch size if that is nearly as good.

        Raises:
            ValueError: if the noise is not measured, or too little is known and there is no batch size to keep.
        """
        noise, model, present = required_noise(self, input), input.throughput, input.batch_size
        sigma2, mu2 = max(noise.sigma2, 0.0), max(noise.mu2, 0.0)  # of nan it is nan
        largest = max(sigma2, mu2)
        if model is None or not (math.isfinite(sigma2) and math.isfinite(mu2) and largest > 0):
            return min(max(unchanged(self, input), self.bounds[0]), self.bounds[1])

        def cost(size: int) -> float:
            """Return the seconds of the progress of an update of one sample."""
            gain = adascale_gain(sigma2 / largest, mu2 / largest, size, 1)  # of their ratio; no division overflows
            return float(model.seconds(size, input.devices, input.minibatch_size) / gain)

        sizes = self.candidates(present)
        best = min(sizes, key=cost)
        if present in sizes and cost(present) <= (1 + self.threshold) * cost(best):
            return present
        return best

    def candidates(self, present: int | None) -> list[int]:
        """Return the batch sizes that are compared, in ascending order.

        Args:
            present: a further one, if it is within the bounds.
        """
        low, high = self.bounds
        grid = {round(low * (high / low) ** (row / (CANDIDATES - 1))) for row in range(CANDIDATES)} | {low, high}
        return sorted(size for size in grid | {present or low} if low <= size <= high)
