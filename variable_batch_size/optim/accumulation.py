"""From the gradients of microbatches to the gradient of a step, in the parameters' own `.grad`.

A rank's share of G = sum_j w_j g_j, with w_j = n_j / B where losses are means over the rows, is built by Horner's
scheme: after microbatch j what has been accumulated is multiplied by w_j / w_(j+1), and after the last one by its
weight. So autograd's own accumulation is the only buffer. Where each microbatch's own gradient is needed, because its
noise is measured or because the scale of a `GradScaler` may change between microbatches, it is added to a buffer and
cleared: each gradient becomes the buffer, to which the one before is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend


def precision(tensors: Sequence[Tensor]) -> torch.dtype:
    """float64 where one of the tensors has numbers of 64 bits, else float32."""
    return torch.float64 if any(torch.finfo(tensor.dtype).bits == 64 for tensor in tensors) else torch.float32


@final
class Gradients:
    """This rank's gradients of `parameters`, from the first microbatch of a step to its update."""

    def __init__(self, parameters: Sequence[Tensor], backend: Backend) -> None:
        self.parameters = list(parameters)
        self._backend = backend
        self._members: list[Tensor] | None = None  # the parameters that have a gradient, on any rank
        self._others: list[Tensor] = []
        self._buffer: dict[Tensor, Tensor] = {}
        self._unit = 0.0  # what the buffer has still to be multiplied with, if not 0
        self._left: list[tuple[Tensor, Tensor, int]] = []  # parameter, gradient and its version, as they were left
        self._begun = False  # whether they hold microbatches of a step
        self.clear()

    @property
    def agreed(self) -> bool:
        """Whether it is fixed which parameters have gradients."""
        return self._members is not None

    def check(self, *, replay: bool) -> None:
        """Look whether a microbatch's `backward()` has added its gradients; a replay may do without.

        Raises:
            TypeError: when a gradient is sparse.
            RuntimeError: when there was no `backward()`, or somebody cleared or replaced gradients within the step.
        """
        if not self.agreed:
            self._check_dense()
        gone = [p for p, gradient, _ in self._left if p.grad is not gradient]
        if self._begun and any(p.grad is None or p.grad.grad_fn is None for p in gone):
            raise RuntimeError(
                "the gradients of a step are accumulated in .grad until its last microbatch, but they were cleared "
                "or replaced before it; leave out model.zero_grad(), which optimizer.step() makes unnecessary"
            )
        same = not gone and all(gradient._version == version for _, gradient, version in self._left)
        if same and len(self._left) == len(self.present()) and not replay:
            raise RuntimeError(
                "each step() follows the backward() of one microbatch, but no gradient has come since the last one; "
                "call loss.backward() first"
            )

    def present(self) -> list[Tensor]:
        """The gradients that are in `.grad`."""
        return [gradient for parameter in self.parameters if (gradient := parameter.grad) is not None]

    def mask(self) -> list[bool]:
        """Which parameters have a gradient in this step."""
        return [parameter.grad is not None or parameter in self._buffer for parameter in self.parameters]

    def agree(self, mask: Sequence[bool]) -> None:
        """Fix which parameters have gradients, from this update on."""
        pairs = list(zip(self.parameters, mask, strict=True))
        self._members = [parameter for parameter, has_gradient in pairs if has_gradient]
        self._others = [parameter for parameter, has_gradient in pairs if not has_gradient]

    def keep(self, factor: float) -> None:
        """Multiply what has been accumulated, because another microbatch of the step follows."""
        self.multiply(self.present(), factor)
        self._leave(begun=True)

    def put_aside(self, weight: float, scale: Tensor | None = None) -> None:
        """Add `weight` / `scale` (0-D) times this microbatch's gradient to the buffer, and clear it."""
        pairs = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if scale is not None or self._backend.static_graph:
            self._weigh([gradient for _, gradient in pairs], weight, scale)
        elif weight:  # by Horner's scheme here, too
            if self._unit not in (0, weight):
                self.multiply(list(self._buffer.values()), self._unit / weight)
            self._unit = weight
        else:
            pairs = []
        known = [(self._buffer[parameter], gradient) for parameter, gradient in pairs if parameter in self._buffer]
        if known:  # into the new one: were that freed, the youngest memory, malloc would return it to the system
            torch._foreach_add_([new for _, new in known], [old for old, _ in known])
        self._buffer.update(pairs)
        for parameter in self.parameters:
            parameter.grad = None
        self._left = []

    def whole(self, factor: float) -> list[Tensor]:
        """`factor` times this rank's share of the step's gradient, in `.grad`: what has been accumulated."""
        weighed = self._buffer and not self._unit
        for parameter, gradient in self._buffer.items():
            parameter.grad = gradient
        gradients = self._complete()
        if not (weighed and factor == 1):
            self.multiply(gradients, factor * (self._unit or 1.0))
        return gradients

    def _weigh(self, gradients: list[Tensor], weight: float, scale: Tensor | None) -> None:
        if scale is None or not (weight or self._backend.static_graph):
            self.multiply(gradients, weight)
        elif gradients:
            torch._foreach_mul_(gradients, weight / scale.to(precision(gradients)))

    def multiply(self, gradients: list[Tensor], factor: Any) -> None:
        """Multiply in place, by a float or a 0-D tensor; where graphs are static, whatever the factor is."""
        if isinstance(factor, Tensor):
            torch._foreach_mul_(gradients, factor)
            return
        if not gradients or (factor == 1 and not self._backend.static_graph):
            return
        if factor == 0 and not self._backend.static_graph:
            torch._foreach_zero_(gradients)  # also where a replayed gradient is not finite
            return
        torch._foreach_mul_(gradients, self._backend.scalar(factor, gradients[0]))

    def spare(self, finite: Any) -> None:
        """Make the whole gradients 0 where a `finite` that nobody may read says no."""
        if isinstance(finite, Tensor):
            for gradient in self.present():
                gradient.masked_fill_(~finite, 0)

    def multiply_each(self, groups: Sequence[dict[str, Any]], factors: Sequence[Any]) -> None:
        """Multiply the whole gradients of each parameter group by its factor."""
        for group, factor in zip(groups, factors, strict=True):
            self.multiply([parameter.grad for parameter in group["params"] if parameter.grad is not None], factor)

    def clear(self) -> None:
        """Forget the step: for the next one, or because it was broken off."""
        self._buffer.clear()
        self._unit = 0.0
        if not self._backend.static_graph:
            for parameter in self.parameters:
                parameter.grad = None
        elif gradients := self.present():
            torch._foreach_zero_(gradients)
        self._leave(begun=False)

    def _leave(self, *, begun: bool) -> None:
        """Note the gradients as they are now, so that the next `check` sees what has happened to them."""
        self._begun = begun
        self._left = [(p, g, g._version) for p in self.parameters if (g := p.grad) is not None]

    def _check_dense(self) -> None:
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise TypeError(
                    f"gradients must be dense, but parameter {number}, of shape {tuple(parameter.shape)}, has one of "
                    f"layout {parameter.grad.layout}; build the layer with sparse=False"
                )

    def _complete(self) -> list[Tensor]:
        """The gradients of all members; where this rank's samples did not touch one, it is zero."""
        members = self._members if self._members is not None else self.parameters
        thawed = any(parameter.grad is not None for parameter in self._others)
        if thawed or not all(parameter.requires_grad for parameter in members):
            raise RuntimeError(
                f"which parameters have gradients is agreed at the first update, but since then one has "
                f"{'got a gradient that had none' if thawed else 'been frozen'}; set requires_grad before training, "
                f"tell by optimizer.add_param_group, or wrap the inner optimizer anew and load the state"
            )
        for parameter in members:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in members]  # type: ignore[misc]
