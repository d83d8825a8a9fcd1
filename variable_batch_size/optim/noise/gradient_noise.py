"""Measure the gradient noise, sigma^2 and mu^2, at each update, and average it over updates.

If the gradients are on the CPU, numbers are floats. Otherwise they are 0-D tensors, kept on the device, without a host
sync: every update runs the same operations, and an estimate that must not count gets the weight 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import ASGD, Adafactor, Optimizer, Rprop

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import value_error
from variable_batch_size.backend import Backend
from variable_batch_size.optim.noise.differenced import DifferencedEstimator, Gradient
from variable_batch_size.optim.noise.estimate import (
    AVERAGES,
    HORIZON,
    Number,
    Vector,
    coefficients,
    debias,
    gain,
    select,
    update_averages,
)
from variable_batch_size.optim.options import Estimator
from variable_batch_size.optim.tensors.arithmetic import is_narrow, scalar_dtype, squared_norm
from variable_batch_size.rules import ConstantTimescale, Noise, Rule
from variable_batch_size.rules.base import needs_noise


class Statistics(NamedTuple):
    """What the gradients of one update give for its estimate, over all ranks."""

    weighted_squares: Number  # S = sum_j n_j |g_j|^2
    squared_norm: Number  # |G|^2
    finite: bool | Tensor  # whether both are finite: a 0-D tensor on a device


class NoiseState(NamedTuple):
    """What is known after an update."""

    averages: Vector  # (4,), see `AVERAGES`
    gain: Number = 1.0  # of that update
    packed: Tensor | None = None  # (5,): averages and gain on a device, which one transfer reads


@final
class GradientNoise:
    """Measures sigma^2 and mu^2 at each update, and averages them over about `HORIZON` reference updates.

    The estimate e of an update enters as average = theta average + (1 - theta) e, with
    theta = max(0, 1 - (B / ref) / HORIZON). An average is divided by 1 - prod(theta), which corrects the bias of its
    start at 0. sigma^2 and mu^2 are averaged first and divided by each other afterwards.

    The calls of a step: `add_square` for each microbatch, `part` before the sum over the ranks, `statistics` and
    `update` after it, `commit` after the weights have changed, and `clear`.

    `on_device`: numbers stay on the device, without a host sync. `differenced`: an update of a single microbatch is
    compared with the previous update, which takes one more copy of the gradients; otherwise it gives no estimate.
    """

    def __init__(self, backend: Backend, *, on_device: bool, differenced: bool = False) -> None:
        self.on_device = on_device
        self.measured = 0  # updates of this run that could give an estimate, as the host knows it
        self._backend = backend
        self._differenced = DifferencedEstimator(backend, on_device=on_device) if differenced else None
        self._squares: Tensor | None = None  # 0-D: sum of n_j |g_j|^2 over this rank's microbatches
        self._state = NoiseState(np.zeros(len(AVERAGES)))
        self._uncommitted: NoiseState | None = None

    def add_square(self, square: Tensor, factor: float, scale: Tensor | None = None) -> None:
        """Add `factor * |g / scale|^2`, given |g|^2, 0-D, for the gradient g of a microbatch.

        The factor is n_j / d^2 where g / d is the gradient of the mean loss; 0 for a replay. `scale`, of a
        `GradScaler`, is 0-D.
        """
        if scale is not None:
            square = square / scale.to(square.dtype).square()
        square = square * self._backend.scalar(factor, square, "square")
        self._squares = square if self._squares is None else self._squares + square

    def part(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of S = sum_j n_j |g_j|^2, (1,), which the ranks sum."""
        squares = like[0].new_zeros((), dtype=torch.float32) if self._squares is None else self._squares
        return [squares.to(scalar_dtype(like)).view(1)]

    def statistics(self, squares: Tensor, gradients: Sequence[Tensor]) -> Statistics:
        """Return the statistics of the update from S, (1,), and G, both summed over the ranks."""
        if not self.on_device:
            numbers = squares.item(), squared_norm(gradients).item()
            return Statistics(*numbers, all(map(math.isfinite, numbers)))
        weighted_squares = squares[0]
        square = squared_norm(gradients)
        return Statistics(weighted_squares, square, torch.isfinite(weighted_squares + square))  # neither is negative

    def update(self, statistics: Statistics, gradient: Gradient, *, batch_size: int, groups: int, ref: int) -> Noise:
        """Return the noise including this update of J groups, the microbatches of all ranks.

        A non-finite update changes nothing. `gradient` is zeroed if the tensor `statistics.finite` is false.
        """
        paired = groups == 1 and self._differenced is not None and self._differenced.has_previous(gradient)
        self.measured += groups > 1 or paired
        weights = coefficients(batch_size, groups, min(1.0, batch_size / ref / HORIZON), paired=paired)
        squares, square, counts = statistics
        like = torch.as_tensor(square)
        numbers = [float(batch_size), float(ref), float(paired)]
        size, reference, use_pair = self._backend.scalars(numbers, like, "noise")
        measurements, rows = [squares, square], [weights.weighted_squares, weights.squared_norm]
        if self._differenced is not None:
            other, valid = self._differenced.estimate(gradient, square, size, counts)
            measurements += other
            rows += [weights.pair_sigma2, weights.pair_mu2]
            counts = counts & (valid >= use_pair)
        decay, constant, *factors = self._as_vectors([weights.decay, weights.constant, *rows], like, "noise")
        old = self._state.averages
        if self.on_device and not isinstance(old, Tensor):
            (old,) = self._as_vectors([old.tolist()], like, "averages")
        new = update_averages(old, decay, constant, zip(factors, measurements, strict=True))
        averages = select(counts, new, old)
        own_gain = gain(averages, size, reference)
        last = select(statistics.finite, own_gain, self._state.gain)
        packed = torch.cat([averages, torch.as_tensor(last).view(1)]) if self.on_device else None
        self._uncommitted = NoiseState(averages, last, packed)
        return debias(averages, own_gain)

    def _as_vectors(self, rows: Sequence[Sequence[float]], like: Tensor, place: str) -> Sequence[Any]:
        """Return rows of numbers as arrays, or as tensors on the device of `like`."""
        return self._backend.vectors(rows, like, place) if self.on_device else list(np.array(rows))

    def commit(self) -> None:
        """Keep the state of the last `update`."""
        if self._uncommitted is not None:
            self._state, self._uncommitted = self._uncommitted, None

    def clear(self) -> None:
        """Discard the microbatches of the step, and an update that was not committed."""
        self._squares = None
        if self._uncommitted is not None:
            self._uncommitted = None
            if self._differenced is not None:
                self._differenced.forget()  # `update` has overwritten the previous gradient

    def reader(self) -> Callable[[], Noise]:
        """Return a function that returns the present noise; calling it later avoids a wait for the device."""
        state = self._state

        def read() -> Noise:
            *averages, own_gain = _averages_and_gain(state)
            return debias(np.array(averages), own_gain)

        return read

    def noise(self) -> Noise:
        """Return the debiased averages, nan before the first estimate, and the last gain; reads them from a device."""
        return self.reader()()

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and, if it is kept, the previous gradient; reads them from a device."""
        state: dict[str, Any] = dict(zip((*AVERAGES, "gain"), _averages_and_gain(self._state), strict=True))
        return {**state, **(self._differenced.state_dict() if self._differenced is not None else {})}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore a state; None resets everything."""
        state = state or {}
        averages = np.array([float(state.get(name, 0)) for name in AVERAGES])
        self._state = NoiseState(averages, float(state.get("gain", 1)))
        self._uncommitted = None
        if self._differenced is not None:
            self._differenced.load_state_dict(state)


def _averages_and_gain(state: NoiseState) -> list[float]:
    """Return the averages and the gain as floats, by one transfer from a device."""
    averages, own_gain, packed = state
    return [*averages.tolist(), float(own_gain)] if packed is None else packed.cpu().tolist()


_NOT_PROPORTIONAL_TO_LR = (ASGD, Adafactor, Rprop)  # optimizers whose parameter update is not

_UNMEASURED = 50  # updates without any estimate of the noise, after which the user is warned


@final
class UnmeasuredWarning:
    """Warns once if the first updates give no estimate of the noise."""

    def __init__(self) -> None:
        self._updates = 0  # without an estimate so far; negative after the warning, or after an estimate

    def after_update(self, noise: GradientNoise) -> None:
        """Count an update."""
        if self._updates < 0:
            return
        self._updates = -1 if noise.measured else self._updates + 1
        if self._updates == _UNMEASURED:
            self._updates = -1
            warnings.warn(
                f"The gradient noise could not be estimated in the first {_UNMEASURED} updates, because each had a "
                f"single microbatch, and until there is an estimate the gain is at most 1; pass a smaller "
                f'minibatch_size to the sampler, or noise="differenced" to the optimizer',
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )


def create_gradient_noise(
    inner: Optimizer, rules: Sequence[Rule], ref_batchsize: int | None, estimator: Estimator | None, backend: Backend
) -> GradientNoise | None:
    """Return what measures the noise; None if neither a rule nor `estimator` asks for it."""
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    if estimator is None and not any(map(needs_noise, rules)):
        return None
    if ref_batchsize is None:
        raise value_error(
            f"measuring the noise needs ref_batchsize, because averages extend over {HORIZON} updates of that size",
            "none",
            "pass the batch size at which the learning rate was tuned",
        )
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise value_error(
            "measuring the noise needs all parameters on one device", " and ".join(devices), "move them to one"
        )
    on_device = not backend.reads(parameters[0])
    if on_device:
        _check_deferred_lr(inner, parameters, rules)
    return GradientNoise(backend, on_device=on_device, differenced=estimator == "differenced")


def _check_deferred_lr(inner: Optimizer, parameters: Sequence[Tensor], rules: Sequence[Rule]) -> None:
    """Check that a factor on lr can stay on the device, see `DeferredLrFactor`."""
    device = parameters[0].device.type
    if isinstance(inner, _NOT_PROPORTIONAL_TO_LR):
        raise TypeError(
            f"on {device} a learning rate that depends on the noise needs an optimizer whose change is "
            f"proportional to it, but that of {type(inner).__name__} is not; use another inner optimizer"
        )
    if small := {str(p.dtype) for p in parameters if is_narrow(p)}:
        raise TypeError(
            f"on {device} a learning rate that depends on the noise needs parameters of at least 32 bits, because "
            f"it multiplies their change after the step, but some are {' and '.join(sorted(small))}; keep the "
            f"parameters in float32, and use torch.autocast"
        )
    for rule in rules:
        if isinstance(rule, ConstantTimescale) and rule.needs_noise:
            raise TypeError(
                f"on {device} the weight decay must not depend on the noise, which the host does not read there, "
                f"but {rule} makes it depend on it; use the rule without ConstantTimescale"
            )
