"""Does `Goodput` choose batch sizes that are as good as AdaptDL's, by AdaptDL's own goodput function?

Both choose on a grid of models of an update and of the noise, within the same bounds and on the same devices.
`GoodputFunction.optimize` of AdaptDL chooses the rows and the accumulation steps of all devices; `Goodput` chooses the
samples of an update, which the sampler cuts. AdaptDL's function gets what the busiest device then computes. With a
limit on the rows of a microbatch, both accumulate; then a batch of fewer microbatches than devices leaves devices idle,
where AdaptDL divides it.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import numpy as np
from adaptdl.goodput import GoodputFunction, GradParams, PerfParams

from records import Measured
from results import record
from variable_batch_size.adaptive import ControlInput, Goodput, Throughput
from variable_batch_size.rules.base import Noise

REFERENCE = 64
ROWS = 32  # of a microbatch, at most
ROUNDING = 1e-9
AS_GOOD, SHORTFALL = "batch sizes with at least AdaptDL's goodput", "largest shortfall of goodput to AdaptDL's"
DEVICES = (1, 2, 4, 8, 16, 64)
ACCUM_BASE = (0.001, 0.03, 0.3)  # seconds of a microbatch
ACCUM_ROW = (1e-4, 1e-3, 1e-2)
NET = ((0.01, 0.001), (0.1, 0.002), (1.0, 0.1))  # seconds of communication of two devices, and of each further one
OVERLAP = (1.0, 2.0, 10.0)
NOISE_SCALE = (10.0, 300.0, 1e4, 3e5)  # samples
LARGEST = (2048, 65536)  # samples


@dataclass(frozen=True)
class Cell:
    """A model of an update and of the noise, on a number of devices."""

    devices: int
    base: float
    row: float
    net: tuple[float, float]
    overlap: float
    noise_scale: float
    largest: int

    @property
    def theirs(self) -> GoodputFunction:
        """AdaptDL's function; its variance is that of an update of REFERENCE samples."""
        model = PerfParams(self.base, self.row, *self.net, *self.net, self.overlap)
        return GoodputFunction(model, GradParams(sqr=1.0, var=self.noise_scale / REFERENCE), REFERENCE)

    def chosen(self, rows: int | None) -> int:
        """Return the batch size that `Goodput` chooses if a microbatch has at most so many rows."""
        model = Throughput(self.base, self.row, *self.net, self.overlap)
        input = ControlInput(self.devices, None, rows, noise=Noise(self.noise_scale, 1.0), throughput=model)
        return Goodput((REFERENCE, self.largest), threshold=0.0)(input)

    def goodput(self, size: int, rows: int | None) -> float:
        """Return AdaptDL's goodput of a batch size that our sampler cuts and deals."""
        microbatches = self.devices if rows is None else -(-size // rows)
        largest, rounds = -(-size // microbatches), -(-microbatches // self.devices)
        per_second = self.theirs.throughput(1, self.devices, largest, rounds - 1)
        seconds = self.devices * largest * rounds / per_second
        return float(size / seconds * self.theirs.efficiency(size))

    def ratio(self, rows: int | None) -> tuple[float, bool]:
        """Return our goodput relative to AdaptDL's, and whether AdaptDL's batch has `rows` for each device."""
        optimized = self.theirs.optimize(1, self.devices, self.largest, (None, rows), accumulation=True)
        own, atomic, steps = (float(value) for value in optimized)
        return self.goodput(self.chosen(rows), rows) / own, atomic * (steps + 1) >= (rows or 0)


def compare(rows: int | None) -> dict[bool, list[float]]:
    """Return the ratios of all cells, by whether AdaptDL's batch has `rows` for each device."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for values in itertools.product(DEVICES, ACCUM_BASE, ACCUM_ROW, NET, OVERLAP, NOISE_SCALE, LARGEST):
        ratio, full = Cell(*values).ratio(rows)
        found[full].append(ratio)
    return found


def report(ratios: list[float], case: str) -> None:
    as_good = [ratio >= 1 - ROUNDING for ratio in ratios]
    own = {"what": "Goodput", "on": case}
    record(AS_GOOD, measured=Measured(100 * float(np.mean(as_good)), n=len(ratios)), unit="%", **own)
    record(SHORTFALL, measured=Measured(100 * (1 - min(ratios)), n=len(ratios)), unit="%", **own)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    report(compare(None)[True], "any number of rows")
    by_size = compare(ROWS)
    report(by_size[True], f"at most {ROWS} rows, batches with {ROWS} for each device")
    report(by_size[False], f"at most {ROWS} rows, smaller batches")
