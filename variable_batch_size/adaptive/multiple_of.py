"""Another controller, whose batch sizes are rounded to multiples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import MAX_INT, check_int
from variable_batch_size.adaptive.base import ControlInput, OfAnother


@final
@dataclass(frozen=True, slots=True)
class MultipleOf(OfAnother):
    """Controller that rounds the batch size of another one to the nearest multiple of `samples`, at least one.

    Use when: all microbatches are to be full: the multiple is the microbatch size, times the number of devices if that
    does not change.
    Fails when: the batch is a few times the multiple, so that rounding changes it by much.
    Source: none; `BatchTrace.round_to` is the same for a trace, and keeps the sum of the samples.

    >>> from variable_batch_size.adaptive import ConstantBatch
    >>> MultipleOf(ConstantBatch(1000), samples=64)(ControlInput(devices=1))
    1024

    Args:
        controller: chooses the batch size.
        samples: the multiple, in [1, 2**53].

    Raises:
        TypeError: if an argument has another type.
        ValueError: if the multiple is not in its range.
    """

    samples: int

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() does not find a class with slots
        object.__setattr__(self, "samples", check_int(self.samples, "samples", 1, MAX_INT))

    def __call__(self, input: ControlInput, /) -> int:
        """Return the nearest multiple; of two, the larger one."""
        nearest = (self.wanted(input) + self.samples // 2) // self.samples
        return min(max(nearest, 1), MAX_INT // self.samples) * self.samples
