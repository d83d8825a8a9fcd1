"""Another controller, within bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import check_bounds
from variable_batch_size.adaptive.base import ControlInput, OfAnother


@final
@dataclass(frozen=True, slots=True)
class Bounded(OfAnother):
    """Controller that limits another one: B = min(max(controller(...), low), high).

    Use when: the memory, the dataset or a critical batch size limits the batch.
    Fails when: the bounds decide most of the time; `ConstantBatch` is simpler then.
    Source: none.

    >>> from variable_batch_size.adaptive import PerDevice
    >>> Bounded(PerDevice(64), low=128, high=512)(ControlInput(devices=16))
    512

    Args:
        controller: chooses the batch size.
        low: least batch size, in samples.
        high: largest batch size, in samples.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if the bounds are not in [1, 2**53] and in this order.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() does not find a class with slots
        low, high = check_bounds((self.low, self.high))
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    def __call__(self, input: ControlInput, /) -> int:
        """Return the batch size of the controller, limited."""
        return min(max(self.wanted(input), self.low), self.high)
