"""Controllers that measure nothing: the same batch size, or one that is proportional to the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import MAX_INT, check_int
from variable_batch_size.adaptive.base import ControlInput


@final
@dataclass(frozen=True, slots=True)
class PerDevice:
    """Controller whose batch size follows the devices: B = samples * devices.

    Every device computes equally many samples of each update.

    Use when: devices come and go, and the microbatch is to stay.
    Fails when: there are many devices: an update is then worth less than its samples cost.
    Source: the elastic training of André, Strati and Klimovic, DistributedML 2022.

    >>> PerDevice(64)(ControlInput(devices=3))
    192

    Args:
        samples: samples of each update that a device computes, in [1, 2**53].

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is not in this range.
    """

    samples: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", check_int(self.samples, "samples", 1, MAX_INT))

    def __call__(self, input: ControlInput, /) -> int:
        """Return the samples of all devices."""
        return self.samples * input.devices


@final
@dataclass(frozen=True, slots=True)
class ConstantBatch:
    """Controller that keeps the batch size, so that only the time of an update depends on the devices.

    Use when: the updates are to be the same whatever devices there are; it is what others are compared with.
    Fails when: there are more devices than the batch size keeps busy.
    Source: training without a controller does the same.

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
