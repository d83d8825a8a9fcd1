"""Estimates the noise from two consecutive updates, for updates of one microbatch; it stores one more gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.data.plan.state import NUMBER, check_entries
from variable_batch_size.optim.noise.estimate import Estimate, Gradient, Number, estimate_from_pair, select
from variable_batch_size.optim.tensors.arithmetic import local_parts, scalar_dtype, squared_norm


class _Previous(NamedTuple):
    """The gradient of the last update whose gradient was finite."""

    gradients: list[Tensor | None]  # of each parameter
    squared_norm: Number
    batch_size: Number  # samples
    finite: Number = 1.0  # 0 if no gradient was finite yet, so that an estimate must not count


_KEYS = ("gradients", "square", "size", "counts")  # of `_Previous` in a state dict


@final
class DifferencedEstimator:
    """Compares the gradient of each update with that of the previous one, see `estimate_from_pair`."""

    def __init__(self, backend: Backend, *, on_device: bool) -> None:
        self._backend, self._on_device = backend, on_device
        self._previous: _Previous | None = None

    def has_previous(self, gradient: Gradient) -> bool:
        """Return whether there is a previous gradient of the same parameters."""
        if self._previous is None or len(self._previous.gradients) != len(gradient):
            return False
        pairs = zip(self._previous.gradients, gradient, strict=True)
        return all(old is None or new is None or old.shape == new.shape for old, new in pairs)

    def estimate(
        self, gradient: Gradient, square: Number, batch_size: Number, finite: bool | Tensor
    ) -> tuple[Estimate, Number]:
        """Return the estimate from this update and the previous one, and 1 if it is valid; store this gradient.

        Args:
            gradient: the gradient G of this update, of each parameter; it is 0 if the tensor `finite` is false.
            square: |G|^2.
            batch_size: samples of this update.
            finite: whether G was finite, 0-D on a device; if not, the previous gradient stays.
        """
        if isinstance(finite, Tensor):
            batch_size = batch_size * torch.ones_like(torch.as_tensor(square))  # a tensor, of the same dtype
        if not self.has_previous(gradient):
            # On the host an update whose gradient is not finite was skipped before.
            is_finite = finite.to(torch.as_tensor(square).dtype) if isinstance(finite, Tensor) else 1.0
            copies = [None if part is None else part.clone() for part in gradient]
            self._previous = _Previous(copies, select(finite, square, 0.0), batch_size, is_finite)
            return Estimate(0.0, 0.0), 0.0
        assert self._previous is not None
        previous, previous_square, previous_size, valid = self._previous
        difference, previous = self._replace_previous(previous, gradient, finite)
        # The numbers of `_Previous`, of this update if its gradient is finite.
        of_update = square, batch_size, select(finite, 1.0, valid)
        numbers = (select(finite, new, old) for new, old in zip(of_update, self._previous[1:], strict=True))
        self._previous = _Previous(previous, *numbers)
        return estimate_from_pair(square, batch_size, previous_square, previous_size, difference), valid

    def forget(self) -> None:
        """Drop the previous gradient."""
        self._previous = None

    def state_dict(self) -> dict[str, Any]:
        """Return the previous gradient, an empty dict if there is none; reads it from a device."""
        if self._previous is None:
            return {}
        gradients, *numbers = self._previous
        copy = self._backend.host if self._on_device else torch.clone  # a clone on the device would add a graph
        values = [None if part is None else copy(part) for part in gradients], *map(float, numbers)
        return {"earlier": dict(zip(_KEYS, values, strict=True))}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a state is damaged."""
        if "earlier" in state:
            check_entries(state, {"earlier": (dict,)}, "noise.")
            gradients, *numbers = _KEYS
            check_entries(state["earlier"], {gradients: (list,), **dict.fromkeys(numbers, NUMBER)}, "noise.earlier.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; one without a previous gradient drops it."""
        earlier = state.get("earlier")
        self._previous = None if earlier is None else _Previous(*(earlier[key] for key in _KEYS))

    def _replace_previous(
        self, previous: Gradient, gradient: Gradient, finite: bool | Tensor
    ) -> tuple[Number, list[Tensor | None]]:
        """Return |G - G'|^2, and a copy of the present gradient G in the memory of the previous one G'."""
        device = next(part.device for part in gradient if part is not None)  # a restored gradient may be elsewhere
        moved = [None if old is None else old.to(device) for old in previous]
        pairs = list(zip(moved, gradient, strict=True))
        stored = [_gradient_or_zeros(old, like=new) for old, new in pairs]
        now = [_gradient_or_zeros(new, like=old) for old, new in pairs]
        stored_and_now = zip(stored, now, strict=True)
        whole = [old.to(new) for old, new in stored_and_now if old is not None and new is not None]
        old_parts, new = local_parts(whole), local_parts(tensor for tensor in now if tensor is not None)
        torch._foreach_sub_(old_parts, new)  # also changes `whole`, which has the same memory
        square = squared_norm(whole)
        if isinstance(finite, Tensor):  # a non-finite gradient was zeroed, so that the difference is the previous one
            torch._foreach_mul_(old_parts, (~finite).to(scalar_dtype(old_parts)))
            torch._foreach_add_(old_parts, new)
        else:
            torch._foreach_copy_(old_parts, new)
        remaining = iter(whole)
        stored = [old if old is None else next(remaining) for old in stored]
        return square if self._on_device else square.item(), stored


def _gradient_or_zeros(gradient: Tensor | None, *, like: Tensor | None) -> Tensor | None:
    """Return a gradient. For None, return zeros like `like`, the gradient of that parameter in the other update."""
    return torch.zeros_like(like) if gradient is None and like is not None else gradient
