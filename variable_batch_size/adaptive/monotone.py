"""Another controller, whose batch sizes never fall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from variable_batch_size.adaptive.base import ControlInput, OfAnother


@final
@dataclass(frozen=True, slots=True)
class Monotone(OfAnother):
    """Controller that never goes below the present batch size: B' = max(B, controller(...)).

    Use when: the noise scale is expected to grow during the training, and its estimate fluctuates.
    Fails when: one estimate is much too large: the batch size never comes back; limit it with `Bounded`.
    Source: none; `NormTest` does the same.

    >>> from variable_batch_size.adaptive import PerDevice
    >>> Monotone(PerDevice(64))(ControlInput(devices=2, batch_size=256))
    256

    Args:
        controller: chooses the batch size.

    Raises:
        TypeError: if that is no controller.
    """

    def __call__(self, input: ControlInput, /) -> int:
        """Return the batch size of the controller, or the present one if that is larger."""
        return max(self.wanted(input), input.batch_size or 1)
