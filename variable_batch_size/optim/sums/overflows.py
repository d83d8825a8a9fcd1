"""Under a `GradScaler` a microbatch whose gradient is not finite skips the update, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend


@final
class Overflows:
    """Counts the microbatches of a step whose gradient is not finite: an entry of the message."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._number: Any = None  # 0-D on a static graph; None without a scaler

    def add(self, found_inf: Tensor) -> bool:
        """Count a microbatch, if `found_inf`, 0-D, says so; return whether the host knows of an overflow."""
        if self._backend.static_graph:
            self._number = found_inf if self._number is None else self._number + found_inf
            return False
        overflows = found_inf.item()  # as torch's own scaler reads it for optimizers that do not
        self._number = (self._number or 0.0) + overflows
        return bool(overflows)

    def part(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the number on this rank, (1,); nothing without a scaler."""
        if self._number is None:
            return []
        return [torch.as_tensor(self._number, dtype=torch.float32, device=like[0].device).view(1)]

    def found(self, sums: Sequence[Tensor]) -> bool:
        """Return whether there was one on any rank; the host reads it."""
        return any(self._backend.host(number).item() for number in sums)

    def clear(self) -> None:
        """Forget the step."""
        self._number = None


def check_scaled(scale: Tensor | None, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
    """Raise RuntimeError unless scaled losses, and no others, come to `step()` by their `GradScaler`."""
    if found_inf is not None and (scale is None or grad_scale is None):
        raise RuntimeError(
            "the gradients of optimizer.backward(loss, scaler=scaler) must reach step() as they are, but the loss "
            "was scaled in the loop, or scaler.unscale_() has changed them; call optimizer.backward(loss, "
            "scaler=scaler) and scaler.step(optimizer), and clip with max_grad_norm="
        )
    if scale is not None and found_inf is None:
        raise RuntimeError(
            "the gradients of optimizer.backward(loss, scaler=scaler) must reach step() by the scaler, but step() "
            "was called without it; call scaler.step(optimizer), and scaler.update()"
        )
