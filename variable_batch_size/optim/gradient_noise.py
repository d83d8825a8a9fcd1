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
from variable_batch_size.optim.accumulation import precision
from variable_batch_size.rules import Noise, adascale_gain

HORIZON = 1000  # updates at the reference, over which the averages reach
LEAST_SIGMA2, LEAST_MU2 = 1e-6, 0.0  # where the gain is formed

_LARGE, _ROW = 1 << 14, 1 << 10  # elements; a float32 sum over many more than a row loses digits on the CPU


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """sum |t|^2, 0-D on the first tensor's device; float64 on the CPU, elsewhere `precision(tensors)`.

    On the CPU large tensors are summed in rows, which are then added up in float64: PyTorch's own norm of 4 million
    float32 numbers is 1e-4 too small there.
    """
    device = tensors[0].device
    on_cpu = device.type == "cpu"
    small = [tensor for tensor in tensors if not (on_cpu and tensor.numel() > _LARGE)]
    norms = []
    for tensor in tensors if on_cpu else ():
        if tensor.numel() > _LARGE:
            flat = tensor.reshape(-1)
            rows, rest = flat[: flat.numel() // _ROW * _ROW], flat[flat.numel() // _ROW * _ROW :]
            norms.append(torch.linalg.vector_norm(rows.view(-1, _ROW), dim=1, dtype=_at_least_single(tensor)))
            small.append(rest)
    for dtype in dict.fromkeys(map(_at_least_single, small)):  # in the same order in every process
        norms += torch._foreach_norm([tensor for tensor in small if _at_least_single(tensor) == dtype], 2, dtype)
    wide = torch.float64 if on_cpu else precision(tensors)
    return torch.cat([norm.to(device, wide).view(-1) for norm in norms]).square().sum()


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


class Sums(NamedTuple):
    """What the all-reduce of an update tells."""

    squares: Any  # S = sum_j n_j |g_j|^2
    square: Any  # |G|^2
    finite: Any  # a bool, or a 0-D tensor where nobody may read it; then |G|^2 is finite in any case


class Averages(NamedTuple):
    """Sums over updates, in which an estimate has the weight (1 - theta) prod(later theta)."""

    sigma2: Any = 0.0
    mu2: Any = 0.0
    weight: Any = 0.0  # of all estimates: 1 - prod(theta)
    updates: Any = 0.0  # that gave an estimate


class Known(NamedTuple):
    """What is known after an update."""

    averages: Averages = Averages()
    gain: Any = 1.0  # of that update
    packed: Tensor | None = None  # both, (5,), where they are on a device: one transfer reads them


class Earlier(NamedTuple):
    """The whole gradient of the last update, its squared norm, the update's samples, and 0 if it was not finite."""

    gradients: list[Tensor]
    square: Any
    size: Any
    counts: Any = 1.0


@final
class Moments:
    """Measures sigma^2 and mu^2 at each update, and averages them over about `HORIZON` reference updates.

    An update's estimate e enters as average = theta average + (1 - theta) e with theta = max(0, 1 - (B / ref) / 1000),
    and an average is divided by 1 - prod(theta), so that it is not drawn to 0 in the beginning; sigma^2 and mu^2 are
    averaged first and divided by each other afterwards.

    The life of a step here: `add` for each microbatch, `share` for the all-reduce, `sums` and `update` after it,
    `commit` when the weights have moved, `clear`.

    Args:
        backend: the optimizer's.
        deferred: whether numbers stay on the device.
        differenced: whether an update of a single microbatch is compared with the update before, which takes one more
            copy of the gradients; otherwise it gives no estimate, and the averages stay.
    """

    def __init__(self, backend: Backend, *, deferred: bool, differenced: bool = False) -> None:
        self._backend, self._deferred, self._differenced = backend, deferred, differenced
        self._squares: Tensor | None = None  # sum of n_j |g_j|^2 over this rank's microbatches
        self._known = Known()
        self._next: Known | None = None  # until the update is committed
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

    def sums(self, squares: Tensor, gradients: Sequence[Tensor]) -> Sums:
        """Of the shares, summed over the ranks, and of the whole gradients G."""
        if not self._deferred:
            numbers = squares.item(), squared_norm(gradients).item()
            return Sums(*numbers, all(map(math.isfinite, numbers)))
        square = squared_norm(gradients)
        finite = torch.isfinite(squares[0]) & torch.isfinite(square)
        return Sums(squares[0], torch.where(finite, square, 0), finite)

    def update(self, sums: Sums, gradients: Sequence[Tensor], *, batch_size: int, groups: int, ref: int) -> Noise:
        """The noise, this update included; one that is not finite changes nothing.

        Args:
            sums: of `sums`.
            gradients: G, which are 0 where a deferred `sums.finite` says no.
            batch_size: B, in samples.
            groups: J, microbatches over all ranks.
            ref: the reference batch size, in samples.
        """
        comparable = groups == 1 and self._comparable(gradients)
        known = groups > 1 or comparable
        fresh = min(1.0, batch_size / ref / HORIZON) if known else 0.0  # 1 - theta
        inverse = 1 / (groups - 1) if groups > 1 else 0.0
        numbers: Sequence[Any] = batch_size, ref, groups, inverse, fresh, float(known), float(comparable)
        like = sums.squares if self._deferred else gradients[0]
        size, reference, number, inverse, fresh, count, pair = self._backend.scalars(numbers, like)
        estimate = of_groups(sums.squares, sums.square, size, number, inverse)
        if self._differenced:
            other, counts = self._compare(gradients, sums, size)
            estimate = Estimate(estimate.sigma2 + pair * other.sigma2, estimate.mu2 + pair * other.mu2)
            fresh, count = fresh * (1 - pair + pair * counts), count * (1 - pair + pair * counts)
        old = self._known.averages
        if self._deferred and not isinstance(old.weight, Tensor):
            old = Averages(*(sums.squares.new_full((1,), value)[0] for value in old))
        new = Averages(
            (1 - fresh) * old.sigma2 + fresh * estimate.sigma2,
            (1 - fresh) * old.mu2 + fresh * estimate.mu2,
            (1 - fresh) * old.weight + fresh,
            old.updates + count,
        )
        averages = Averages(*(_where(sums.finite, *either) for either in zip(new, old, strict=True)))
        gain = self._gain(averages, size, reference)
        self._next = Known(averages, gain, torch.stack([*averages, gain]) if self._deferred else None)
        return _noise(averages, gain)

    def commit(self) -> None:
        """Keep what `update` gave."""
        if self._next is not None:
            self._known, self._next = self._next, None

    def clear(self) -> None:
        """Forget the step's microbatches, and an update that was not committed."""
        self._squares = None
        if self._next is not None:
            self._next = self._earlier = None

    def noise(self) -> Noise:
        """The averages, nan before the first estimate, and the gain of the last update; reads them from the device."""
        *averages, gain = self._read()
        noise = _noise(Averages(*averages), gain)
        return Noise(noise.sigma2, noise.mu2, gain, int(noise.updates))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and the tensors of the last gradient where it is kept; reads them from the device."""
        state: dict[str, Any] = dict(zip((*Averages._fields, "gain"), self._read(), strict=True))
        if self._earlier is None:
            return state
        gradients, *numbers = self._earlier
        kept = dict(zip(Earlier._fields[1:], map(float, numbers), strict=True))
        copy = self._backend.host if self._deferred else torch.clone  # a clone on the device would be a graph more
        return {**state, "earlier": {**kept, "gradients": [*map(copy, gradients)]}}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` gave; from None, begin anew."""
        state = state or {}
        averages = Averages(*(float(state.get(name, 0)) for name in Averages._fields))
        self._known, self._next, self._earlier = Known(averages, float(state.get("gain", 1))), None, None
        if self._differenced and "earlier" in state:
            self._earlier = Earlier(**state["earlier"])

    def _read(self) -> list[Any]:
        averages, gain, packed = self._known
        return [*averages, gain] if packed is None else packed.cpu().tolist()

    def _gain(self, averages: Averages, batch_size: Any, ref: Any) -> Any:
        sigma2, mu2, weight, _ = averages
        if self._deferred:
            safe = torch.where(weight > 0, weight, 1.0)
            gain = adascale_gain((sigma2 / safe).clamp(LEAST_SIGMA2), (mu2 / safe).clamp(LEAST_MU2), batch_size, ref)
            return torch.where(weight > 0, gain, 1.0)
        if weight == 0:
            return 1.0
        return adascale_gain(max(sigma2 / weight, LEAST_SIGMA2), max(mu2 / weight, LEAST_MU2), batch_size, ref)

    def _comparable(self, gradients: Sequence[Tensor]) -> bool:
        """Whether there is an earlier gradient, of the same parameters."""
        kept = [] if self._earlier is None else self._earlier.gradients
        return [gradient.shape for gradient in kept] == [gradient.shape for gradient in gradients]

    def _compare(self, gradients: Sequence[Tensor], sums: Sums, size: Any) -> tuple[Estimate, Any]:
        """The estimate from this update and the one before, and whether it counts; keeps this one for the next."""
        finite = sums.finite
        if isinstance(finite, Tensor):
            size = size * torch.ones_like(sums.square)  # in its type
        if self._earlier is None or not self._comparable(gradients):
            counts = finite.to(sums.square.dtype) if isinstance(finite, Tensor) else 1.0
            self._earlier = Earlier([*map(torch.clone, gradients)], sums.square, size, counts)
            return Estimate(0.0, 0.0), 0.0
        kept, square, earlier_size, counts = self._earlier
        kept = [old.to(new) for old, new in zip(kept, gradients, strict=True)]  # after loading, from the host
        torch._foreach_sub_(kept, list(gradients))
        difference = squared_norm(kept) if self._deferred else squared_norm(kept).item()
        if isinstance(finite, Tensor):  # if it is not, gradients are 0 and `kept` is as it was
            torch._foreach_mul_(kept, (~finite).to(precision(kept)))
            torch._foreach_add_(kept, list(gradients))
        else:
            torch._foreach_copy_(kept, list(gradients))
        now = Earlier(kept, sums.square, size, _where(finite, 1.0, counts))
        self._earlier = Earlier(
            kept, *(_where(finite, *either) for either in zip(now[1:], self._earlier[1:], strict=True))
        )
        return of_pair(sums.square, size, square, earlier_size, difference), counts


def _noise(averages: Averages, gain: Any) -> Noise:
    sigma2, mu2, weight, updates = averages
    if isinstance(weight, float):
        weight = weight or math.nan
    return Noise(sigma2 / weight, mu2 / weight, gain, updates)


def _where(finite: Any, new: Any, old: Any) -> Any:
    return torch.where(finite, new, old) if isinstance(finite, Tensor) else new
