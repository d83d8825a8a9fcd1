"""Another controller, whose answers are approached step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import check_positive, value_error
from variable_batch_size.adaptive.base import ControlInput, OfAnother


@final
@dataclass(frozen=True, slots=True)
class Smoothed(OfAnother):
    """Controller that goes a part of the way: B' = B^(1 - weight) * wanted^weight, wanted = controller(...).

    The geometric mean of the present batch size and the wanted one is rounded towards the latter, so that the wanted
    one is reached. Without a present batch size it is the wanted one.

    Use when: the estimate of the noise fluctuates by more than the batch size should.
    Fails when: the answers change at once for good reason, as when devices leave; or the controller compares with the
    present batch size itself, as `Goodput` does.
    Source: none.

    >>> from variable_batch_size.adaptive import ConstantBatch
    >>> Smoothed(ConstantBatch(1600), weight=0.5)(ControlInput(devices=1, batch_size=100))
    400

    Args:
        controller: chooses the wanted batch size.
        weight: the part of the way, in (0, 1].

    Raises:
        TypeError: if an argument has another type.
        ValueError: if the weight is not in its range.
    """

    weight: float

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() does not find a class with slots
        weight = check_positive(self.weight, "weight", "pass a number in (0, 1]")
        if weight > 1:
            raise value_error("weight must be <= 1", weight, "pass a number in (0, 1]")
        object.__setattr__(self, "weight", weight)

    def __call__(self, input: ControlInput, /) -> int:
        """Return the geometric mean, at least one sample closer to the wanted batch size."""
        wanted, present = self.wanted(input), input.batch_size
        if present is None:
            return wanted
        mean: float = present * (wanted / present) ** self.weight
        if wanted > present:
            return min(max(math.ceil(mean), present + 1), wanted)
        return max(min(math.floor(mean), present - 1), wanted)
