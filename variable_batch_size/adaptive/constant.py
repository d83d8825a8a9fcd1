"""The same batch size on any number of devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import MAX_INT, check_int
from variable_batch_size.adaptive.base import ControlInput


@final
@dataclass(frozen=True, slots=True)
class ConstantBatch:
    """Controller that keeps the batch size, so that only the time of an update depends on the devices.

    Use when: the updates are to be the same whatever devices there are; it is what others are compared with.
    Fails when: there are more devices than the batch size keeps busy.
    Source: this is what a training does without a controller.

    >>> ConstantBatch(1024)(ControlInput(devices=3))
    1024

    Args:
        batch_size: samples of each update, in [1, 2**53].

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is not in this range.
    """

    batch_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_size", check_int(self.batch_size, "batch_size", 1, MAX_INT))

    def __call__(self, input: ControlInput, /) -> int:
        """Return the batch size."""
        return self.batch_size
