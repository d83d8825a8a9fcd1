"""This rank's share of the gradient of a step, from its first microbatch to the update.

The share is sum_j w_j g_j over the microbatches j of this rank, with w_j = n_j / B if the loss is a mean over the rows.
There are two ways to accumulate it. `InPlaceAccumulation` needs no memory, because autograd adds to `.grad` by itself.
`BufferedAccumulation` moves the gradient of each microbatch from `.grad` to a buffer, so that it is known by itself:
the noise, a `GradScaler` whose scale may change, gradients in half precision and loops that run other backwards within
a step need that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.optim.tensors import are_parts, is_narrow, local, scalar_dtype, sum_over_parts


def multiply(gradients: Sequence[Tensor], factor: Any, backend: Backend) -> None:
    """Multiply gradients in place by a float or a 0-D tensor; a static graph has no special cases 0 and 1."""
    if not gradients or (isinstance(factor, float) and factor == 1 and not backend.static_graph):
        return
    parts = local(gradients)
    torch._foreach_mul_(parts, factor if isinstance(factor, Tensor) else backend.scalar(factor, parts[0]))


def products(gradients: Sequence[Tensor], factor: float, backend: Backend, place: str) -> list[Tensor]:
    """Return gradients times a factor: in place, but as new tensors with a static graph.

    There the gradient of a linear layer, as backward leaves it, is a view of its transpose. Changed in place, both
    would be results of the graph: 1.4 times the time of a backward that is dominated by linear layers, on XLA:CPU.
    """
    if not gradients or not backend.static_graph:
        multiply(gradients, factor, backend)
        return list(gradients)
    return list(torch._foreach_mul(list(gradients), backend.scalar(factor, gradients[0], place)))


def collect_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of those parameters that have one."""
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def check_dense(parameters: Sequence[Tensor]) -> None:
    """Raise TypeError if a gradient is sparse."""
    for number, parameter in enumerate(parameters):
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise TypeError(
                f"gradients must be dense, but that of parameter {number}, of shape {tuple(parameter.shape)}, has "
                f"layout {parameter.grad.layout}; build the layer with sparse=False"
            )


class Aside(NamedTuple):
    """What this rank has accumulated of a step apart from `.grad`."""

    gradients: Mapping[Tensor, Tensor]  # by parameter
    weight: float  # by which it must be multiplied


NOTHING = Aside({}, 1.0)


class Accumulation(ABC):
    """Accumulates the weighted gradients of the microbatches of a step on this rank."""

    keeps_grad: bool  # whether `.grad` holds the microbatches of an incomplete step

    def __init__(self, parameters: Sequence[Tensor], backend: Backend) -> None:
        self.parameters = list(parameters)
        self._backend = backend
        self._has_gradient = [False] * len(self.parameters)
        self._has_parts = are_parts(self.parameters)
        self._weight = 1.0  # by which what is accumulated must still be multiplied

    @property
    def has_gradient(self) -> tuple[bool, ...]:
        """For each parameter, whether a microbatch of this step has given it a gradient on this rank."""
        return tuple(self._has_gradient)

    @final
    def add(
        self, fresh: Iterable[bool], weight: float, next_weight: float | None, grad_scale: Tensor | None = None
    ) -> None:
        """Accumulate a microbatch, whose `backward()` has run.

        Args:
            weight: weight of the microbatch in the gradient of the step; 0 for a replay.
            next_weight: that of the next microbatch of this rank in the same step; None after the last one.
            grad_scale: scale of the loss under a `GradScaler`, 0-D.
        """
        if weight or self._backend.static_graph:  # there the ranks' graphs must be equal, with or without a replay
            pairs = zip(self._has_gradient, fresh, strict=True)
            self._has_gradient = [known or new for known, new in pairs]
        if self._has_parts:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad = sum_over_parts(parameter.grad, parameter)
        self._add(weight, next_weight, grad_scale)

    @abstractmethod
    def _add(self, weight: float, next_weight: float | None, grad_scale: Tensor | None) -> None: ...

    def aside(self) -> Aside:
        """Return what is accumulated apart from `.grad`."""
        return NOTHING

    @abstractmethod
    def finish(self, factor: float | None, members: Sequence[bool]) -> list[Tensor]:
        """Put `factor` times this rank's share in `.grad`, and return the gradients of the members.

        Operations that may differ between ranks are executed: they must not be in the graph of the collective, which
        has to be the same on all ranks.

        Args:
            factor: a factor that all parameters share; None if there is none in any update.
            members: for each parameter, whether it takes part in the update; `.grad` of others is None afterwards, and
                a member without a gradient on this rank gets zeros.
        """

    def exclude(self, members: Sequence[bool]) -> None:
        """Set `.grad` to None where a parameter is no member, until `clear`."""
        for parameter, member in zip(self.parameters, members, strict=True):
            if not member:
                parameter.grad = None

    def drop_current(self) -> None:
        """Drop the gradients in `.grad`, which no call of `add` has counted."""
        for parameter in self.parameters:
            parameter.grad = None

    def clear(self) -> None:
        """Discard the accumulated microbatches, after an update or to start the step over."""
        self._has_gradient = [False] * len(self.parameters)
        self.drop_current()


@final
class InPlaceAccumulation(Accumulation):
    """Accumulates in `.grad` by Horner's scheme, which needs no other buffer."""

    keeps_grad = True

    def _add(self, weight: float, next_weight: float | None, grad_scale: Tensor | None) -> None:
        assert grad_scale is None, "a GradScaler needs BufferedAccumulation"
        # sum_j w_j g_j = (...((g_1 w_1 / w_2 + g_2) w_2 / w_3 + g_3)...) w_J: `.grad` always lacks the weight of the
        # last microbatch that is in it. The next `backward()` adds to it without a copy, equal weights cost nothing,
        # and `finish` multiplies by w_J together with the factor of the update.
        if next_weight is None:
            self._weight = weight
        elif weight != next_weight or self._backend.static_graph:
            present = [parameter for parameter in self.parameters if parameter.grad is not None]
            self._multiply(present, weight / next_weight, "microbatch")

    def finish(self, factor: float | None, members: Sequence[bool]) -> list[Tensor]:
        """Put `factor` times this rank's share in `.grad`, and return the gradients of the members."""
        self.exclude(members)
        present = [p for p, member in zip(self.parameters, members, strict=True) if member]
        missing = [parameter for parameter in present if parameter.grad is None]
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        if not self._backend.static_graph:  # of a replay, which may be non-finite: 0 * inf is nan
            pairs = zip(self.parameters, self._has_gradient, members, strict=True)
            if unused := [p.grad for p, used, member in pairs if member and not used and p.grad is not None]:
                torch._foreach_zero_(local(unused))
        factor = (1.0 if factor is None else factor) * self._weight
        gradients = self._multiply(present, factor, "update")  # in the graph of any other microbatch
        self._backend.mark_step()
        return gradients

    def _multiply(self, parameters: Sequence[Tensor], factor: float, place: str) -> list[Tensor]:
        """Multiply the gradients of parameters, which have one, and return them."""
        gradients: list[Tensor] = [parameter.grad for parameter in parameters]  # type: ignore[misc]
        gradients = products(gradients, factor, self._backend, place)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return gradients

    def drop_current(self) -> None:
        """Drop the gradients in `.grad`, with what has been accumulated there."""
        super().drop_current()
        self._weight = 1.0


@final
class BufferedAccumulation(Accumulation):
    """Accumulates in a buffer, in float32 for gradients in half precision; `.grad` is None before each microbatch.

    Weights are applied by Horner's scheme here, too, so that only a change of the weight costs a multiplication. With a
    static graph or a `GradScaler` each gradient is weighted before it is added. Otherwise the gradients of the last
    microbatch stay in `.grad` until `finish`.
    """

    keeps_grad = False

    def __init__(self, parameters: Sequence[Tensor], backend: Backend) -> None:
        super().__init__(parameters, backend)
        self._buffer: dict[Tensor, Tensor] = {}  # parameter -> gradient

    def _add(self, weight: float, next_weight: float | None, grad_scale: Tensor | None) -> None:
        if grad_scale is None and not self._backend.static_graph:
            if self._buffer:
                multiply(list(self._buffer.values()), self._weight / weight, self._backend)
            self._weight = weight
            if next_weight is None:
                return
        self._take(weight, grad_scale)

    def _take(self, weight: float, grad_scale: Tensor | None = None) -> None:
        new = {parameter: widen(parameter.grad) for parameter in self.parameters if parameter.grad is not None}
        for parameter in self.parameters:
            parameter.grad = None
        if not (weight or self._backend.static_graph):
            return  # a replay, whose gradient may be non-finite: 0 * inf is nan
        if grad_scale is not None:
            self._weight, gradients = 1.0, list(new.values())
            if gradients:
                torch._foreach_mul_(local(gradients), weight / grad_scale.to(scalar_dtype(gradients)))
        elif self._backend.static_graph:
            weighted = products(list(new.values()), weight, self._backend, "microbatch")
            new = dict(zip(new, weighted, strict=True))
        known = [parameter for parameter in new if parameter in self._buffer]
        if known:  # add to the newer tensors: if the newest allocation is freed, malloc returns it to the system
            pairs = local(new[parameter] for parameter in known), local(self._buffer[parameter] for parameter in known)
            if self._backend.static_graph:  # there it takes half the time of a sum in place to trace
                new |= dict(zip(known, torch._foreach_add(*pairs), strict=True))
            else:
                torch._foreach_add_(*pairs)
        self._buffer |= new

    def finish(self, factor: float | None, members: Sequence[bool]) -> list[Tensor]:
        """Put `factor` times this rank's share in `.grad`, and return the gradients of the members."""
        if not self._backend.static_graph:
            self._take(self._weight)
        self.exclude(members)
        present = [p for p, member in zip(self.parameters, members, strict=True) if member]
        missing = [parameter for parameter in present if parameter not in self._buffer]
        self._buffer |= {parameter: widen(torch.zeros_like(parameter)) for parameter in missing}
        shares = [self._buffer[parameter] for parameter in present]
        self._backend.mark_step()
        if factor is not None or not self._backend.static_graph:  # there the weights have been applied
            factor = (1.0 if factor is None else factor) * self._weight
            shares = products(shares, factor, self._backend, "update")
        gradients = [share.to(parameter.dtype) for parameter, share in zip(present, shares, strict=True)]
        for parameter, gradient in zip(present, gradients, strict=True):
            parameter.grad = gradient
        return gradients

    def aside(self) -> Aside:
        """Return what is accumulated apart from `.grad`."""
        return Aside(self._buffer, self._weight)

    def clear(self) -> None:
        """Discard the accumulated microbatches, after an update or to start the step over."""
        super().clear()
        self._buffer = {}
        self._weight = 1.0


def widen(gradient: Tensor) -> Tensor:
    """Return a gradient in at least float32."""
    return gradient.float() if is_narrow(gradient) else gradient
