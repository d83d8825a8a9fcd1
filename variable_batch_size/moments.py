"""How much gradients differ from one microbatch to the next: sigma^2 and mu^2, measured and averaged.

sigma^2 is the variance of one sample's gradient (the trace of the covariance), mu^2 the squared norm of the true
gradient: neither depends on the batch size, the microbatch or the world, so nothing is rescaled when those change.

Numbers are floats where gradients are on the CPU. Elsewhere they are 0-D tensors on the gradients' device, which the
host never reads: the same operations run at every update, and what does not count enters with weight 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.rules import Noise, adascale_gain

HORIZON = 1000  # updates at the reference, over which the averages reach
LEAST_SIGMA2, LEAST_MU2 = 1e-6, 0.0  # where the gain is formed

_LARGE = 1 << 14  # elements; a float32 sum over more of them loses digits on the CPU


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """sum |t|^2, 0-D on the first tensor's device; float64 on the CPU, elsewhere `precision(tensors)`.

    On the CPU the rows of a large tensor are summed one by one, and then in float64: PyTorch's own norm of 4 million
    float32 numbers is 1e-4 too small there.
    """
    device = tensors[0].device
    on_cpu = device.type == "cpu"
    large: list[Tensor] = []
    small: list[Tensor] = []
    for tensor in tensors:
        (large if on_cpu and tensor.dim() > 1 and tensor.numel() > _LARGE else small).append(tensor)
    norms = [torch.linalg.vector_norm(t, dim=tuple(range(1, t.dim())), dtype=_at_least_single(t)) for t in large]
    for dtype in {_at_least_single(tensor) for tensor in small}:
        norms += torch._foreach_norm([tensor for tensor in small if _at_least_single(tensor) == dtype], 2, dtype)
    wide = torch.float64 if on_cpu else precision(tensors)
    return torch.cat([norm.to(device, wide).view(-1) for norm in norms]).square().sum()


def precision(tensors: Sequence[Tensor]) -> torch.dtype:
    """float64 where one of the tensors has numbers of 64 bits, else float32."""
    return torch.float64 if any(torch.finfo(tensor.dtype).bits == 64 for tensor in tensors) else torch.float32


def _at_least_single(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.dtype.itemsize < 4 else None


class Estimate(NamedTuple):
    """Of one update."""

    sigma2: Any
    mu2: Any


def of_groups(squares: Any, square: Any, batch_size: Any, groups: Any, inverse: Any) -> Estimate:
    """From the J microbatches of an update: sigma^2 = (S - B |G|^2) / (J - 1), mu^2 = (J |G|^2 - S / B) / (J - 1).

    Args:
        squares: S = sum_j n_j |g_j|^2.
        square: |G|^2, where G = sum_j (n_j / B) g_j.
        batch_size: B, in samples.
        groups: J.
        inverse: 1 / (J - 1), or 0 where J = 1.
    """
    return Estimate((squares - batch_size * square) * inverse, (groups * square - squares / batch_size) * inverse)


def of_pair(square: Any, size: Any, earlier: Any, earlier_size: Any, difference: Any) -> Estimate:
    """From the gradients G and G' of two updates of n and n' samples, as if they were the two groups of one.

    sigma^2 = n n' / (n + n') |G - G'|^2 and mu^2 = (n |G|^2 + n' |G'|^2 - 2 sigma^2) / (n + n'), which is what
    `of_groups` gives (Qiao et al. 2021, arXiv 2008.12260, section 3.1: consecutive gradients of a single replica).

    Args:
        square: |G|^2.
        size: n, in samples.
        earlier: |G'|^2.
        earlier_size: n', in samples.
        difference: |G - G'|^2.
    """
    both = size + earlier_size
    sigma2 = size * earlier_size / both * difference
    return Estimate(sigma2, (size * square + earlier_size * earlier - 2 * sigma2) / both)


class Averages(NamedTuple):
    """Sums over updates, in which an estimate has the weight (1 - theta) prod(later theta)."""

    sigma2: Any = 0.0
    mu2: Any = 0.0
    weight: Any = 0.0  # of all estimates: 1 - prod(theta)
    updates: Any = 0.0  # that gave an estimate


class Earlier(NamedTuple):
    """The whole gradient of the last update, its squared norm, and the update's samples."""

    gradients: list[Tensor]
    square: Any
    size: Any


@final
class Moments:
    """Measures sigma^2 and mu^2 at each update, and averages them over about `HORIZON` reference updates.

    An update's estimate e enters as average = theta average + (1 - theta) e with theta = max(0, 1 - (B / ref) / 1000),
    and an average is divided by 1 - prod(theta), so that it is not drawn to 0 in the beginning; sigma^2 and mu^2 are
    averaged first and divided by each other afterwards.

    Args:
        backend: the optimizer's.
        deferred: whether numbers stay on the device.
        differenced: whether an update of a single microbatch is compared with the update before, which takes one more
            copy of the gradients; otherwise it gives no estimate, and the averages stay.
    """

    def __init__(self, backend: Backend, *, deferred: bool, differenced: bool = False) -> None:
        self._backend, self._deferred, self._differenced = backend, deferred, differenced
        self._squares: Tensor | None = None  # sum of n_j |g_j|^2 over this rank's microbatches
        self._averages = Averages()
        self._gain: Any = 1.0  # of the last update
        self._packed: Tensor | None = None  # both, (5,), where they are on a device: one transfer reads them
        self._earlier: Earlier | None = None

    def add(self, gradients: Sequence[Tensor], factor: float, scale: Tensor | None = None) -> None:
        """Add `factor` |g / scale|^2, of one microbatch's gradients g; `scale` is 0-D."""
        if not gradients or (factor == 0 and not self._backend.static_graph):
            return  # also where a replayed gradient is not finite
        square = squared_norm(gradients)
        if scale is not None:
            square = square / scale.to(square.dtype).square()
        square = square * self._backend.scalar(factor, square)
        self._squares = square if self._squares is None else self._squares + square

    def share(self, gradients: Sequence[Tensor]) -> Tensor:
        """This rank's part of S = sum_j n_j |g_j|^2, (1,), to be summed over the ranks beside the gradients."""
        squares = gradients[0].new_zeros((), dtype=torch.float32) if self._squares is None else self._squares
        return squares.to(precision(gradients)).view(1)

    def clear(self) -> None:
        """Forget the step's microbatches."""
        self._squares = None

    def finite(self, squares: Tensor) -> bool | Tensor:
        """Whether all microbatches were finite, by the sum of `share` over the ranks; 0-D where it is deferred."""
        return torch.isfinite(squares[0]) if self._deferred else math.isfinite(squares.item())

    def update(
        self,
        squares: Tensor,
        gradients: Sequence[Tensor],
        finite: bool | Tensor,
        batch_size: int,
        groups: int,
        ref: int,
    ) -> Noise:
        """Take in an update; one that is not finite, as a deferred `finite` says, changes nothing.

        Args:
            squares: the sum of `share` over the ranks, (1,).
            gradients: G, finite in any case.
            finite: `finite(squares)`.
            batch_size: B, in samples.
            groups: J, microbatches over all ranks.
            ref: the reference batch size, in samples.
        """
        differs = groups == 1 and self._earlier is not None
        known = groups > 1 or differs
        theta = max(0.0, 1 - batch_size / ref / HORIZON) if known else 1.0
        inverse = 1 / (groups - 1) if groups > 1 else 0.0
        numbers = batch_size, ref, groups, inverse, theta, 1 - theta, float(known), float(differs)
        size, reference, number, inverse, before, now, count, pair = self._backend.scalars(numbers, squares)
        square = self._number(squared_norm(gradients))
        estimate = of_groups(self._number(squares[0]), square, size, number, inverse)
        if self._differenced:
            other = self._compare(gradients, square, size, finite)
            estimate = Estimate(estimate.sigma2 + pair * other.sigma2, estimate.mu2 + pair * other.mu2)
        old = self._averages
        new = Averages(
            before * old.sigma2 + now * estimate.sigma2,
            before * old.mu2 + now * estimate.mu2,
            before * old.weight + now,
            old.updates + count,
        )
        self._averages = Averages(*(_where(finite, *either) for either in zip(new, old, strict=True)))
        self._gain = self._gain_at(size, reference)
        self._packed = torch.stack([*self._averages, self._gain]) if self._deferred else None
        return _noise(self._averages, self._gain)

    def noise(self) -> Noise:
        """The averages, nan before the first estimate, and the gain of the last update; reads them from the device."""
        *averages, gain = self._read()
        return _noise(Averages(*averages), gain)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and the tensors of the last gradient where it is kept; reads them from the device."""
        state: dict[str, Any] = dict(zip((*Averages._fields, "gain"), self._read(), strict=True))
        if self._earlier is None:
            return state
        gradients, square, size = self._earlier
        return {**state, "earlier": [*map(torch.clone, gradients)], "square": float(square), "size": float(size)}

    def load_state_dict(self, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        """Restore what `state_dict` gave."""
        self._averages = Averages(*(float(state[name]) for name in Averages._fields))
        self._gain, self._packed = float(state["gain"]), None
        self._earlier = None
        if self._differenced and "earlier" in state:
            pairs = zip(state["earlier"], parameters, strict=True)
            gradients = [gradient.to(parameter.device, copy=True) for gradient, parameter in pairs]
            self._earlier = Earlier(gradients, float(state["square"]), float(state["size"]))

    def _read(self) -> list[float]:
        return [*self._averages, self._gain] if self._packed is None else self._packed.cpu().tolist()

    def _number(self, value: Tensor) -> Any:
        return value if self._deferred else value.item()

    def _gain_at(self, batch_size: Any, ref: Any) -> Any:
        sigma2, mu2, weight, _ = self._averages
        if self._deferred:
            safe = torch.where(weight > 0, weight, 1.0)
            gain = adascale_gain((sigma2 / safe).clamp(LEAST_SIGMA2), (mu2 / safe).clamp(LEAST_MU2), batch_size, ref)
            return torch.where(weight > 0, gain, 1.0)
        if weight == 0:
            return 1.0
        return adascale_gain(max(sigma2 / weight, LEAST_SIGMA2), max(mu2 / weight, LEAST_MU2), batch_size, ref)

    def _compare(self, gradients: Sequence[Tensor], square: Any, size: Any, finite: bool | Tensor) -> Estimate:
        """The estimate from this update and the one before; and keep this one, if it is finite, for the next."""
        if self._earlier is None:
            self._earlier = Earlier([*map(torch.clone, gradients)], square, size)
            return Estimate(0.0, 0.0)
        kept, earlier_square, earlier_size = self._earlier
        torch._foreach_sub_(kept, list(gradients))
        difference = self._number(squared_norm(kept))
        if isinstance(finite, Tensor):  # if it is not, gradients are zero and `kept` is as it was
            torch._foreach_mul_(kept, (~finite).to(precision(kept)))
            torch._foreach_add_(kept, list(gradients))
        else:
            torch._foreach_copy_(kept, list(gradients))
        self._earlier = Earlier(kept, _where(finite, square, earlier_square), _where(finite, size, earlier_size))
        return of_pair(square, size, earlier_square, earlier_size, difference)


def _noise(averages: Averages, gain: Any) -> Noise:
    sigma2, mu2, weight, updates = averages
    if isinstance(weight, float):
        weight = weight or math.nan
    return Noise(sigma2 / weight, mu2 / weight, gain, updates)


def _where(finite: bool | Tensor, new: Any, old: Any) -> Any:
    return torch.where(finite, new, old) if isinstance(finite, Tensor) else new
