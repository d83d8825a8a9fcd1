"""An example of each controller, for the contract suite; a new controller is a line here."""

from __future__ import annotations

from dataclasses import dataclass

from variable_batch_size.adaptive import (
    After,
    ConstantBatch,
    Controller,
    Goodput,
    Monotone,
    NoiseScale,
    NormTest,
    PerDevice,
    Seesaw,
    Smoothed,
)
from variable_batch_size.trace import BatchTrace


@dataclass(frozen=True)
class Halving:
    """A schedule: samples -> factor on the learning rate, which halves every so many samples, and is 0 in the end."""

    samples: int
    end: int

    def __call__(self, samples: int) -> float:
        return 0.0 if samples >= self.end else 0.5 ** min(samples // self.samples, 2000)


EXAMPLES: tuple[Controller, ...] = (
    PerDevice(64),
    ConstantBatch(1024),
    NoiseScale(0.5),
    NormTest(0.7),
    Goodput((32, 4096)),
    Seesaw(Halving(10_000, 10**6), 256, 2048),
    Monotone(NoiseScale()),
    Smoothed(NoiseScale(), 0.3),
    After(5_000, ConstantBatch(100), NormTest(1.0)),
)
WITH_TRACE = After(5_000, BatchTrace.from_runs([100, 200], [10, 5], on_end="hold"), NoiseScale())
