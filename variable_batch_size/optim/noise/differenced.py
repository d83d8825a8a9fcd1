"""Estimates the noise from two consecutive updates, for updates of one microbatch; it stores one more gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.backend.base import scalar_dtype
from variable_batch_size.data.plan.state import NUMBER, check_entries
from variable_batch_size.optim.noise.estimate import Estimate, Gradient, Number, estimate_from_pair, select
from variable_batch_size.optim.tensors.arithmetic import local_parts, squared_norm


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
        """Return whether the gradient of an earlier update is there to compare `gradient`, by parameter, with it."""
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
        """Return the previous gradient, read from a device, and its numbers; an empty dict if there is none."""
        if self._previous is None:
            return {}
        gradients, *numbers = self._previous
        copy = self._backend.host if self._on_device else torch.clone  # a clone on the device would add a graph
        copies = [None if gradient is None else copy(gradient) for gradient in gradients]
        return {"earlier": dict(zip(_KEYS, (copies, *map(float, numbers)), strict=True))}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the gradient of the previous update, in a state, is damaged; a state may have none."""
        if "earlier" in state:
            check_entries(state, {"earlier": (dict,)}, "noise.")
            gradients, *numbers = _KEYS
            check_entries(state["earlier"], {gradients: (list,), **dict.fromkeys(numbers, NUMBER)}, "noise.earlier.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the gradient of the previous update, to compare the next one with; drop it if the state has none."""
        earlier = state.get("earlier")
        if earlier is None:
            self._previous = None
            return
        gradients, *numbers = (earlier[key] for key in _KEYS)
        copies = [None if gradient is None else gradient.clone() for gradient in gradients]  # later ones replace them
        self._previous = _Previous(copies, *numbers)

    def _replace_previous(
        self, previous: Gradient, gradient: Gradient, finite: bool | Tensor
    ) -> tuple[Number, list[Tensor | None]]:
        """Return |G - G'|^2, and a copy of the present gradient G in the memory of the previous one G'.

        Args:
            previous: G', by parameter; None counts as 0.
            gradient: G, by parameter.
            finite: whether G is finite, 0-D on a device. If it is false there, G is 0, and the copy is G' instead.
        """
        device = next(part.device for part in gradient if part is not None)  # a restored G' may be on another one
        moved = [None if old is None else old.to(device) for old in previous]
        pairs = list(zip(moved, gradient, strict=True))
        old_or_zeros = [_gradient_or_zeros(old, like=new) for old, new in pairs]
        new_or_zeros = [_gradient_or_zeros(new, like=old) for old, new in pairs]
        old_and_new = zip(old_or_zeros, new_or_zeros, strict=True)
        memory = [old.to(new) for old, new in old_and_new if old is not None and new is not None]
        memory_parts = local_parts(memory)
        new_parts = local_parts(tensor for tensor in new_or_zeros if tensor is not None)
        torch._foreach_sub_(memory_parts, new_parts)  # also changes `memory`, whose parts they are, to G' - G
        square = squared_norm(memory)
        if isinstance(finite, Tensor):  # G' - G is multiplied by 0 if G is finite, and by 1 if G is 0; then G is added
            torch._foreach_mul_(memory_parts, (~finite).to(scalar_dtype(memory_parts)))
            torch._foreach_add_(memory_parts, new_parts)
        else:
            torch._foreach_copy_(memory_parts, new_parts)
        tensors = iter(memory)
        stored = [None if old is None else next(tensors) for old in old_or_zeros]
        return square if self._on_device else square.item(), stored


def _gradient_or_zeros(gradient: Tensor | None, *, like: Tensor | None) -> Tensor | None:
    """Return a gradient. For None, return zeros like `like`, the gradient of that parameter in the other update."""
    return torch.zeros_like(like) if gradient is None and like is not None else gradient
