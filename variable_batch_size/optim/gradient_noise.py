"""Measure the gradient noise, sigma^2 and mu^2, at each update, and average it over updates.

sigma^2 is the variance of the gradient of one sample (the trace of its covariance), and mu^2 the squared norm of the
true gradient. Neither depends on the batch size, the microbatch size or the world, so nothing is rescaled when those
change.

If the gradients are on the CPU, numbers are floats. Otherwise they are 0-D tensors, kept on the device, without a host
sync: every update runs the same operations, and an estimate that must not count gets the weight 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.optim.accumulation import scalar_dtype
from variable_batch_size.rules import Noise, adascale_gain

HORIZON = 1000  # number of updates at the reference over which the averages extend
MIN_SIGMA2, MIN_MU2 = 1e-6, 0.0  # lower bounds in the gain

_LARGE, _ROW = 1 << 14, 1 << 10  # elements; a float32 sum of many more than a row loses digits on the CPU


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return sum |t|^2 over the tensors, 0-D on the first tensor's device: float64 on the CPU, else `scalar_dtype`.

    On the CPU, large tensors are summed by rows, and the sums of the rows in float64: `torch.linalg.vector_norm` of 4
    million float32 numbers is 1e-4 too small there.
    """
    device = tensors[0].device
    on_cpu = device.type == "cpu"
    small = [tensor for tensor in tensors if not (on_cpu and tensor.numel() > _LARGE)]
    norms = []  # () each, or (rows,) of a large tensor
    for tensor in tensors if on_cpu else ():
        if tensor.numel() > _LARGE:
            flat = tensor.reshape(-1)
            end = flat.numel() // _ROW * _ROW
            rows = flat[:end].view(-1, _ROW)  # (rows, _ROW)
            norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=_at_least_float32(tensor)))
            small.append(flat[end:])
    for dtype in dict.fromkeys(map(_at_least_float32, small)):  # a dict keeps the same order in every process
        norms += torch._foreach_norm([tensor for tensor in small if _at_least_float32(tensor) == dtype], 2, dtype)
    sum_dtype = torch.float64 if on_cpu else scalar_dtype(tensors)
    return torch.cat([norm.to(device, sum_dtype).view(-1) for norm in norms]).square().sum()


def _at_least_float32(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype in which to compute a norm; None is that of the tensor."""
    return torch.float32 if tensor.dtype.itemsize < 4 else None


class Estimate(NamedTuple):
    """An unbiased estimate of sigma^2 and mu^2 from one update, or from two consecutive ones."""

    sigma2: Any
    mu2: Any


def estimate_from_groups(
    weighted_squares: Any, squared_norm: Any, batch_size: Any, groups: Any, inverse_dof: Any
) -> Estimate:
    """Estimate the noise from the J >= 2 microbatches of an update.

    sigma^2 = (S - B |G|^2) / (J - 1) and mu^2 = (J |G|^2 - S / B) / (J - 1). Arguments are floats, arrays or tensors.

    Args:
        weighted_squares: S = sum_j n_j |g_j|^2.
        squared_norm: |G|^2, with G = sum_j (n_j / B) g_j.
        batch_size: B, in samples.
        groups: J.
        inverse_dof: 1 / (J - 1); 0 if J = 1, which makes the estimate 0.

    >>> estimate_from_groups(weighted_squares=6.0, squared_norm=2.0, batch_size=2, groups=2, inverse_dof=1.0)
    Estimate(sigma2=2.0, mu2=1.0)
    """
    sigma2 = (weighted_squares - batch_size * squared_norm) * inverse_dof
    return Estimate(sigma2, (groups * squared_norm - weighted_squares / batch_size) * inverse_dof)


def estimate_from_pair(
    squared_norm: Any, batch_size: Any, previous_squared_norm: Any, previous_batch_size: Any, squared_difference: Any
) -> Estimate:
    """Estimate the noise from the gradients G and G' of two updates of n and n' samples.

    sigma^2 = n n' / (n + n') |G - G'|^2 and mu^2 = (n |G|^2 + n' |G'|^2 - 2 sigma^2) / (n + n'), which equals
    `estimate_from_groups` for G and G' as the two groups of one update (Qiao et al. 2021, arXiv 2008.12260, section
    3.1: consecutive gradients of a single replica). Arguments are floats, arrays or tensors.

    Args:
        squared_norm: |G|^2.
        batch_size: n, in samples.
        previous_squared_norm: |G'|^2.
        previous_batch_size: n', in samples.
        squared_difference: |G - G'|^2.
    """
    both = batch_size + previous_batch_size
    sigma2 = batch_size * previous_batch_size / both * squared_difference
    return Estimate(
        sigma2, (batch_size * squared_norm + previous_batch_size * previous_squared_norm - 2 * sigma2) / both
    )


class Statistics(NamedTuple):
    """What the gradients of one update give for its estimate, over all ranks."""

    weighted_squares: Any  # S = sum_j n_j |g_j|^2
    squared_norm: Any  # |G|^2; on a device, 0 if it is not finite
    finite: Any  # whether both are finite: a bool, or a 0-D tensor on a device


class RunningAverages(NamedTuple):
    """Sums over updates, in which the estimate of an update has weight (1 - theta) prod(theta of later updates)."""

    sigma2: Any = 0.0
    mu2: Any = 0.0
    weight: Any = 0.0  # sum of the weights: 1 - prod(theta)
    updates: Any = 0.0  # number of updates that gave an estimate


class NoiseState(NamedTuple):
    """What is known after an update."""

    averages: RunningAverages = RunningAverages()
    gain: Any = 1.0  # of that update
    packed: Tensor | None = None  # (5,): averages and gain on a device, which one transfer reads


class PreviousGradient(NamedTuple):
    """The reduced gradient of the previous update; numbers are floats or, on a device, 0-D tensors."""

    gradients: list[Tensor]
    squared_norm: Any
    batch_size: Any  # samples
    finite: Any = 1.0  # 0 if it was not finite


_PREVIOUS_KEYS = ("gradients", "square", "size", "counts")  # of `PreviousGradient` in a state dict


@final
class GradientNoise:
    """Measures sigma^2 and mu^2 at each update, and averages them over about `HORIZON` reference updates.

    The estimate e of an update enters as average = theta average + (1 - theta) e, with
    theta = max(0, 1 - (B / ref) / HORIZON). An average is divided by 1 - prod(theta), which corrects the bias of its
    start at 0. sigma^2 and mu^2 are averaged first and divided by each other afterwards.

    The calls of a step: `add` for each microbatch, `local_squares` before the all-reduce, `statistics` and `update`
    after it, `commit` after the weights have changed, and `clear`.

    Args:
        backend: backend of the optimizer.
        on_device: whether numbers are kept on the device, without a host sync.
        differenced: whether an update of a single microbatch is compared with the previous update, which takes one
            more copy of the gradients. Otherwise it gives no estimate, and the averages stay.
    """

    def __init__(self, backend: Backend, *, on_device: bool, differenced: bool = False) -> None:
        self.on_device = on_device
        self._backend, self._differenced = backend, differenced
        self._squares: Tensor | None = None  # 0-D: sum of n_j |g_j|^2 over this rank's microbatches
        self._state = NoiseState()
        self._uncommitted: NoiseState | None = None
        self._previous: PreviousGradient | None = None

    def add(self, gradients: Sequence[Tensor], factor: float, scale: Tensor | None = None) -> None:
        """Add `factor * |g / scale|^2` for the gradients g of one microbatch.

        Args:
            gradients: g, as backward() left it.
            factor: n_j / d^2, where g / d is the gradient of the mean loss; 0 for a replay.
            scale: loss scale of a `GradScaler`, 0-D.
        """
        if not gradients or (factor == 0 and not self._backend.static_graph):
            return  # the gradient of a replay may be non-finite, and 0 * inf is nan
        square = squared_norm(gradients)
        if scale is not None:
            square = square / scale.to(square.dtype).square()
        square = square * self._backend.scalar(factor, square)
        self._squares = square if self._squares is None else self._squares + square

    def local_squares(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return this rank's part of S = sum_j n_j |g_j|^2, (1,), which the all-reduce sums."""
        squares = gradients[0].new_zeros((), dtype=torch.float32) if self._squares is None else self._squares
        return squares.to(scalar_dtype(gradients)).view(1)

    def statistics(self, squares: Tensor, gradients: Sequence[Tensor]) -> Statistics:
        """Return the statistics of the update.

        Args:
            squares: S, (1,), summed over the ranks.
            gradients: G, reduced.
        """
        if not self.on_device:
            numbers = squares.item(), squared_norm(gradients).item()
            return Statistics(*numbers, all(map(math.isfinite, numbers)))
        square = squared_norm(gradients)
        finite = torch.isfinite(squares[0]) & torch.isfinite(square)
        return Statistics(squares[0], torch.where(finite, square, 0), finite)

    def update(
        self, statistics: Statistics, gradients: Sequence[Tensor], *, batch_size: int, groups: int, ref: int
    ) -> Noise:
        """Return the noise including this update; a non-finite update changes nothing.

        Args:
            statistics: of this update.
            gradients: G; zeroed if the tensor `statistics.finite` is false.
            batch_size: B, in samples.
            groups: J, the number of microbatches over all ranks.
            ref: reference batch size, in samples.
        """
        paired = groups == 1 and self._previous_is_comparable(gradients)
        measured = groups > 1 or paired
        one_minus_theta = min(1.0, batch_size / ref / HORIZON) if measured else 0.0
        inverse_dof = 1 / (groups - 1) if groups > 1 else 0.0
        numbers = (batch_size, ref, groups, inverse_dof, one_minus_theta, float(measured), float(paired))
        like = statistics.weighted_squares if self.on_device else gradients[0]
        size, reference, number, inverse, weight, count, use_pair = self._backend.scalars(numbers, like)
        estimate = estimate_from_groups(statistics.weighted_squares, statistics.squared_norm, size, number, inverse)
        if self._differenced:
            other, valid = self._estimate_from_previous(gradients, statistics, size)
            estimate = Estimate(estimate.sigma2 + use_pair * other.sigma2, estimate.mu2 + use_pair * other.mu2)
            counts = 1 - use_pair + use_pair * valid
            weight, count = weight * counts, count * counts
        old = self._state.averages
        if self.on_device and not isinstance(old.weight, Tensor):
            old = RunningAverages(*(statistics.weighted_squares.new_full((1,), value)[0] for value in old))
        new = RunningAverages(
            (1 - weight) * old.sigma2 + weight * estimate.sigma2,
            (1 - weight) * old.mu2 + weight * estimate.mu2,
            (1 - weight) * old.weight + weight,
            old.updates + count,
        )
        averages = RunningAverages(*(_select(statistics.finite, *values) for values in zip(new, old, strict=True)))
        gain = self._gain(averages, size, reference)
        packed = torch.stack([*averages, gain]) if self.on_device else None
        self._uncommitted = NoiseState(averages, gain, packed)
        return _debiased(averages, gain)

    def commit(self) -> None:
        """Keep the state of the last `update`."""
        if self._uncommitted is not None:
            self._state, self._uncommitted = self._uncommitted, None

    def clear(self) -> None:
        """Discard the microbatches of the step, and an update that was not committed."""
        self._squares = None
        if self._uncommitted is not None:
            self._uncommitted = self._previous = None  # `update` has overwritten the previous gradient

    def noise(self) -> Noise:
        """Return the debiased averages, nan before the first estimate, and the last gain; reads them from a device."""
        *averages, gain = self._read()
        noise = _debiased(RunningAverages(*averages), gain)
        return Noise(noise.sigma2, noise.mu2, gain, int(noise.updates))

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and, if it is kept, the previous gradient; reads them from a device."""
        state: dict[str, Any] = dict(zip((*RunningAverages._fields, "gain"), self._read(), strict=True))
        if self._previous is None:
            return state
        gradients, *numbers = self._previous
        copy = self._backend.host if self.on_device else torch.clone  # a clone on the device would add a graph
        values = [*map(copy, gradients)], *map(float, numbers)
        return {**state, "earlier": dict(zip(_PREVIOUS_KEYS, values, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore a state; None resets everything."""
        state = state or {}
        averages = RunningAverages(*(float(state.get(name, 0)) for name in RunningAverages._fields))
        self._state = NoiseState(averages, float(state.get("gain", 1)))
        self._uncommitted = self._previous = None
        if self._differenced and "earlier" in state:
            self._previous = PreviousGradient(*(state["earlier"][key] for key in _PREVIOUS_KEYS))

    def _read(self) -> list[Any]:
        averages, gain, packed = self._state
        return [*averages, gain] if packed is None else packed.cpu().tolist()

    def _gain(self, averages: RunningAverages, batch_size: Any, ref: Any) -> Any:
        sigma2, mu2, weight, _ = averages
        if self.on_device:
            safe = torch.where(weight > 0, weight, 1.0)
            gain = adascale_gain((sigma2 / safe).clamp(MIN_SIGMA2), (mu2 / safe).clamp(MIN_MU2), batch_size, ref)
            return torch.where(weight > 0, gain, 1.0)
        if weight == 0:
            return 1.0
        return adascale_gain(max(sigma2 / weight, MIN_SIGMA2), max(mu2 / weight, MIN_MU2), batch_size, ref)

    def _previous_is_comparable(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether there is a previous gradient, with the same shapes."""
        previous = [] if self._previous is None else self._previous.gradients
        return [gradient.shape for gradient in previous] == [gradient.shape for gradient in gradients]

    def _estimate_from_previous(
        self, gradients: Sequence[Tensor], statistics: Statistics, batch_size: Any
    ) -> tuple[Estimate, Any]:
        """Return the estimate from this update and the previous one, and 1 if it is valid; keep this gradient."""
        finite, square = statistics.finite, statistics.squared_norm
        if isinstance(finite, Tensor):
            batch_size = batch_size * torch.ones_like(square)  # a tensor, of the same dtype
        if self._previous is None or not self._previous_is_comparable(gradients):
            is_finite = finite.to(square.dtype) if isinstance(finite, Tensor) else 1.0
            self._previous = PreviousGradient([*map(torch.clone, gradients)], square, batch_size, is_finite)
            return Estimate(0.0, 0.0), 0.0
        kept, previous_square, previous_size, counts = self._previous
        kept = [old.to(new) for old, new in zip(kept, gradients, strict=True)]  # a loaded state is on the host
        torch._foreach_sub_(kept, list(gradients))
        difference = squared_norm(kept) if self.on_device else squared_norm(kept).item()
        if isinstance(finite, Tensor):  # a non-finite gradient was zeroed, so that `kept` still is the previous one
            torch._foreach_mul_(kept, (~finite).to(scalar_dtype(kept)))
            torch._foreach_add_(kept, list(gradients))
        else:
            torch._foreach_copy_(kept, list(gradients))
        now = square, batch_size, _select(finite, 1.0, counts)
        numbers = (_select(finite, *values) for values in zip(now, self._previous[1:], strict=True))
        self._previous = PreviousGradient(kept, *numbers)
        return estimate_from_pair(square, batch_size, previous_square, previous_size, difference), counts


def _debiased(averages: RunningAverages, gain: Any) -> Noise:
    """Return the averages divided by their weight; nan before the first estimate."""
    sigma2, mu2, weight, updates = averages
    if isinstance(weight, float):
        weight = weight or math.nan
    return Noise(sigma2 / weight, mu2 / weight, gain, updates)


def _select(finite: Any, new: Any, old: Any) -> Any:
    """Return `old` if the tensor `finite` is false, without a host sync, and `new` otherwise."""
    return torch.where(finite, new, old) if isinstance(finite, Tensor) else new
