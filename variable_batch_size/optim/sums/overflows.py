"""Under a `GradScaler` a microbatch whose gradient is not finite skips the update, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.microbatching import Microbatch


class Scaled(NamedTuple):
    """What a `GradScaler` has said to `step()`.

    Attributes:
        found_inf: whether the gradient is not finite, 0-D; None without a scaler.
        grad_scale: the scale of the loss, if the scaler has not divided by it yet, 0-D.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def check(self, scale: Tensor | None) -> None:
        """Raise RuntimeError if `step()` was called by a scaler without a scaled loss, or the other way around.

        `scale`: by which `optimizer.backward(scaler=)` has multiplied the losses of the step. None if it has not.
        """
        if self.found_inf is not None and (scale is None or self.grad_scale is None):
            raise RuntimeError(
                "step() needs gradients of optimizer.backward(loss, scaler=scaler), but the loss was scaled in the "
                "loop, or unscale_() has changed them; call it and scaler.step(optimizer), and clip with max_grad_norm="
            )
        if scale is not None and self.found_inf is None:
            raise RuntimeError(
                "the gradients of optimizer.backward(loss, scaler=scaler) must reach step() by the scaler, but step() "
                "was called without it; call scaler.step(optimizer), and scaler.update()"
            )


@final
class Overflows:
    """Counts the microbatches of a step whose gradient is not finite: an entry of the message."""

    name, by_microbatch, whole = "overflows", False, True

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._number: Any = None  # 0-D on a static graph; None without a scaler

    def add(self, microbatch: Microbatch, found_inf: Tensor) -> bool:
        """Count a microbatch if its gradient is not finite; return whether the host knows that it is not.

        Args:
            microbatch: the microbatch.
            found_inf: 0-D, 1 if the gradient is not finite.
        """
        # A microbatch without samples has weight 0, so that it does not count. There is no `if`: on a static graph all
        # microbatches have the same operations.
        found_inf = found_inf * (microbatch.samples > 0)
        if self._backend.static_graph:
            self._number = found_inf if self._number is None else self._number + found_inf
            return False
        overflows = found_inf.item()  # one wait for the device, as torch's own scaler has it
        self._number = (self._number or 0.0) + overflows
        return bool(overflows)

    def part(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return in how many microbatches this rank's gradient was not finite, (1,), for the ranks to sum.

        Without a `GradScaler` the list is empty. `like`: tensors on the device of the parameters.
        """
        if self._number is None:
            return []
        return [torch.as_tensor(self._number, dtype=torch.float32, device=like[0].device).view(1)]

    def found(self, sums: Sequence[Tensor]) -> bool:
        """Return whether any rank has counted an overflow, from the sums of `part` over the ranks."""
        return any(self._backend.host(number).item() for number in sums)

    def clear(self) -> None:
        """Forget the step."""
        self._number = None
