"""How far a training is, in updates at the reference batch size: the sum of `Scaling.progress` over its updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor


@final
class Progress:
    """A sum of floats on the host, or of 0-D tensors on a device without a host sync.

    On a device the sum is stored as an integer part and a fractional part, so that float32 loses no digits in a long
    training.

    Args:
        value: initial value, in updates at the reference.
    """

    def __init__(self, value: float = 0.0) -> None:
        self._value: float | Tensor = value  # on a device (2,): the integer part, and the fraction in [0, 1)

    def add(self, progress: Any) -> None:
        """Add the progress of one update, a float or a 0-D tensor, in updates at the reference."""
        if not isinstance(progress, Tensor):
            self._value += progress
            return
        integer, fraction = self._value if isinstance(self._value, Tensor) else divmod(self._value, 1.0)
        fraction = fraction + progress
        self._value = torch.stack([integer + fraction.floor(), fraction - fraction.floor()])

    def later(self) -> Callable[[], float]:
        """Return a function that returns the present sum; calling it later avoids a wait for the device."""
        value = self._value
        return lambda: value if isinstance(value, float) else sum(value.cpu().tolist())

    def __float__(self) -> float:
        return self.later()()
