"""The slow twin of Megatron-LM's batch size calculators (megatron/core/num_microbatches_calculator.py), step by step.

Megatron-LM asks its calculator for the batch size before each step, with the samples that were consumed until then. The
divisibility of a batch size by the micro batch size and the number of ranks is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def play(batch_size: Callable[[int], int], steps: int) -> list[int]:
    """Return the batch sizes of a training in which a calculator maps the consumed samples to the next batch size."""
    sizes: list[int] = []
    for _ in range(steps):
        sizes.append(batch_size(sum(sizes)))
    return sizes


class StepSchedule:
    """`--step-batch-size-schedule`: thresholds in samples, or in tokens if there is a sequence length."""

    def __init__(self, schedule: str, sequence_length: int | None = None) -> None:
        entries = [entry.split(":", 1) for entry in schedule.replace(",", " ").split()]
        pairs = [(number(threshold) // (sequence_length or 1), number(size)) for threshold, size in entries]
        self.entries = sorted(pairs, key=lambda pair: pair[0])
        thresholds = [threshold for threshold, _ in self.entries]
        self.valid = thresholds[0] == 0 and len(set(thresholds)) == len(thresholds)

    def __call__(self, consumed: int) -> int:
        return [size for threshold, size in self.entries if threshold <= consumed][-1]


def number(text: str) -> int:
    """Return a number as Megatron-LM does, in float64."""
    factor = FACTORS.get(text[-1].upper(), 1)
    return int(float(text if factor == 1 else text[:-1]) * factor)


@dataclass
class LinearRamp:
    """The former `--rampup-batch-size start increment samples`, with `--global-batch-size end`.

    `real` is the type of the samples per increment: float64 in Megatron-LM, which can miss the sample at which a batch
    size begins if `samples` is not a multiple of the number of increments.
    """

    start: int
    end: int
    increment: int
    samples: int
    real: type[float] | type[Fraction] = Fraction

    def __call__(self, consumed: int) -> int:
        if consumed > self.samples:
            return self.end
        samples_per_increment = self.real(self.samples) / ((self.end - self.start) // self.increment)
        return self.start + int(consumed / samples_per_increment) * self.increment
