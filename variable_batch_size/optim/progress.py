"""How far a training is, in updates at the reference batch size: the sum of the gains of its updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor


@final
class Progress:
    """A sum that grows by floats on the host, or by 0-D tensors on a device without being read.

    On a device it is kept as a whole number and a fraction, so that a float32 loses nothing of a long training.
    """

    def __init__(self, value: float = 0.0) -> None:
        self._value: float | Tensor = value  # (2,) on a device: the whole number, and the fraction in [0, 1)

    def add(self, progress: Any) -> None:
        """Move on."""
        if not isinstance(progress, Tensor):
            self._value += progress
            return
        whole, fraction = self._value if isinstance(self._value, Tensor) else divmod(self._value, 1.0)
        fraction = fraction + progress
        self._value = torch.stack([whole + fraction.floor(), fraction - fraction.floor()])

    def later(self) -> Callable[[], float]:
        """The sum as it stands now, to be read when the device has come to it."""
        value = self._value
        return lambda: value if isinstance(value, float) else sum(value.cpu().tolist())

    def __float__(self) -> float:
        return self.later()()
