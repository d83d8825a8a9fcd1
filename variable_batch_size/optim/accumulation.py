"""Accumulate the weighted gradients of a step's microbatches in the parameters' own `.grad`.

This rank's share of G = sum_j w_j g_j, with w_j = n_j / B if the loss is a mean over the rows, is computed by Horner's
scheme: after microbatch j the accumulated gradient is multiplied by w_j / w_(j+1), and after the last one by its
weight. The accumulation of autograd in `.grad` is then the only buffer.

The gradient of each single microbatch is needed if the noise is measured, or if a `GradScaler` may change its scale
between microbatches. It is then moved from `.grad` to a buffer: the old buffer is added to the new gradient, which
becomes the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend


def scalar_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of 0-D factors and sums for these tensors: float64 if any has 64-bit numbers, else float32."""
    return torch.float64 if any(torch.finfo(tensor.dtype).bits == 64 for tensor in tensors) else torch.float32


@final
class Gradients:
    """The gradients of this rank, from the first microbatch of a step to its update.

    The members are the parameters that have a gradient on any rank; the first update fixes them.

    Args:
        parameters: all parameters of the optimizer, in the order of its groups.
        backend: backend of the optimizer.
    """

    def __init__(self, parameters: Sequence[Tensor], backend: Backend) -> None:
        self.parameters = list(parameters)
        self._backend = backend
        self._members: list[Tensor] | None = None
        self._non_members: list[Tensor] = []
        self._buffer: dict[Tensor, Tensor] = {}  # parameter -> gradient
        self._buffer_weight = 0.0  # by which the buffer must still be multiplied; 0 if it is weighted already
        self._seen: list[tuple[Tensor, Tensor, int]] = []  # parameter, gradient and its version, after the last call
        self._inside_step = False  # whether `.grad` holds microbatches of an incomplete step
        self.clear()

    @property
    def membership_fixed(self) -> bool:
        """Whether it is fixed which parameters have gradients."""
        return self._members is not None

    def check(self, *, replay: bool) -> None:
        """Check that `backward()` has added the gradients of a microbatch.

        Args:
            replay: whether the microbatch is a replay, which may have no gradients.

        Raises:
            TypeError: if a gradient is sparse.
            RuntimeError: if there was no `backward()`, or gradients were cleared or replaced within the step.
        """
        if not self.membership_fixed:
            self._check_dense()
        replaced = [parameter for parameter, gradient, _ in self._seen if parameter.grad is not gradient]
        # backward(create_graph=True) also replaces .grad, by a sum that has a grad_fn.
        if self._inside_step and any(p.grad is None or p.grad.grad_fn is None for p in replaced):
            raise RuntimeError(
                "the gradients of a step must stay in .grad until its last microbatch, but they were cleared or "
                "replaced before it; remove model.zero_grad(), because optimizer.step() clears the gradients"
            )
        unchanged = not replaced and all(gradient._version == version for _, gradient, version in self._seen)
        if unchanged and len(self._seen) == len(self.present()) and not replay:
            raise RuntimeError(
                "each step() must follow the backward() of one microbatch, but no gradient has changed since the last "
                "step(); call loss.backward() first"
            )

    def present(self) -> list[Tensor]:
        """Return the gradients of all parameters whose `.grad` is not None."""
        return [gradient for parameter in self.parameters if (gradient := parameter.grad) is not None]

    def mask(self) -> list[bool]:
        """Return, for each parameter, whether it has a gradient in this step on this rank."""
        return [parameter.grad is not None or parameter in self._buffer for parameter in self.parameters]

    def fix_membership(self, mask: Sequence[bool]) -> None:
        """Fix which parameters have gradients, for this update and all later ones.

        Args:
            mask: for each parameter, whether it has a gradient on any rank.
        """
        pairs = list(zip(self.parameters, mask, strict=True))
        self._members = [parameter for parameter, has_gradient in pairs if has_gradient]
        self._non_members = [parameter for parameter, has_gradient in pairs if not has_gradient]

    def accumulate_in_place(self, factor: float) -> None:
        """Keep the accumulated gradients in `.grad`, multiplied by `factor`, for the next microbatch of the step."""
        self.multiply(self.present(), factor)
        self._remember(inside_step=True)

    def accumulate_buffered(self, weight: float, scale: Tensor | None = None) -> None:
        """Add `weight / scale` times the gradients of this microbatch to the buffer, and clear `.grad`.

        Args:
            weight: weight of the microbatch in the gradient of the step; 0 for a replay.
            scale: loss scale of a `GradScaler`, 0-D.
        """
        pairs = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if scale is not None or self._backend.static_graph:
            self._apply_weight([gradient for _, gradient in pairs], weight, scale)
        elif weight:  # Horner's scheme: only a change of the weight costs a multiplication
            if self._buffer_weight not in (0, weight):
                self.multiply(list(self._buffer.values()), self._buffer_weight / weight)
            self._buffer_weight = weight
        else:
            pairs = []
        known = [(self._buffer[parameter], gradient) for parameter, gradient in pairs if parameter in self._buffer]
        if known:  # add to the newer tensors: if the newest allocation is freed, malloc returns it to the system
            torch._foreach_add_([new for _, new in known], [old for old, _ in known])
        self._buffer.update(pairs)
        for parameter in self.parameters:
            parameter.grad = None
        self._seen = []

    def finalize(self, factor: float) -> list[Tensor]:
        """Put `factor` times this rank's share of the step's gradient in `.grad`; return one tensor per member.

        Raises:
            RuntimeError: if the parameters that have gradients are not the members.
        """
        weighted = self._buffer and not self._buffer_weight
        for parameter, gradient in self._buffer.items():
            parameter.grad = gradient
        gradients = self._fill_missing()
        if not (weighted and factor == 1):
            self.multiply(gradients, factor * (self._buffer_weight or 1.0))
        return gradients

    def multiply(self, gradients: list[Tensor], factor: Any) -> None:
        """Multiply gradients in place by a float or a 0-D tensor; a static graph has no special cases 0 and 1."""
        if isinstance(factor, Tensor):
            torch._foreach_mul_(gradients, factor)
            return
        if not gradients or (factor == 1 and not self._backend.static_graph):
            return
        if factor == 0 and not self._backend.static_graph:
            torch._foreach_zero_(gradients)  # the gradient of a replay may be non-finite, and 0 * inf is nan
            return
        torch._foreach_mul_(gradients, self._backend.scalar(factor, gradients[0]))

    def multiply_groups(self, groups: Sequence[dict[str, Any]], factors: Sequence[Any]) -> None:
        """Multiply the gradients of each parameter group by its factor, a float or a 0-D tensor."""
        for group, factor in zip(groups, factors, strict=True):
            self.multiply([parameter.grad for parameter in group["params"] if parameter.grad is not None], factor)

    def zero_nonfinite(self, finite: Any) -> None:
        """Zero the gradients if the 0-D flag `finite` is false, without a host sync; a bool has no effect."""
        if isinstance(finite, Tensor):
            for gradient in self.present():
                gradient.masked_fill_(~finite, 0)

    def clear(self) -> None:
        """Discard the accumulated microbatches, after an update or to start the step over."""
        self._buffer.clear()
        self._buffer_weight = 0.0
        if not self._backend.static_graph:
            for parameter in self.parameters:
                parameter.grad = None
        elif gradients := self.present():
            torch._foreach_zero_(gradients)
        self._remember(inside_step=False)

    def _remember(self, *, inside_step: bool) -> None:
        """Record the gradients and their versions, for the next `check`."""
        self._inside_step = inside_step
        self._seen = [(p, g, g._version) for p in self.parameters if (g := p.grad) is not None]

    def _apply_weight(self, gradients: list[Tensor], weight: float, scale: Tensor | None) -> None:
        if scale is None or not (weight or self._backend.static_graph):
            self.multiply(gradients, weight)
        elif gradients:
            torch._foreach_mul_(gradients, weight / scale.to(scalar_dtype(gradients)))

    def _check_dense(self) -> None:
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise TypeError(
                    f"gradients must be dense, but that of parameter {number}, of shape {tuple(parameter.shape)}, has "
                    f"layout {parameter.grad.layout}; build the layer with sparse=False"
                )

    def _fill_missing(self) -> list[Tensor]:
        """Return the gradients of all members; missing gradients are filled with zeros."""
        members = self._members if self._members is not None else self.parameters
        unfrozen = any(parameter.grad is not None for parameter in self._non_members)
        if unfrozen or not all(parameter.requires_grad for parameter in members):
            raise RuntimeError(
                f"the first update fixes which parameters have gradients, but since then a parameter "
                f"{'that had no gradient now has one' if unfrozen else 'that had a gradient was frozen'}; set "
                f"requires_grad before the training, add parameters with optimizer.add_param_group(), or wrap the "
                f"inner optimizer again and load the state"
            )
        for parameter in members:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in members]  # type: ignore[misc]
