"""Measure the gradient noise, sigma^2 and mu^2, at each update, and average it over updates.

If the gradients are on the CPU, numbers are floats. Otherwise they are 0-D tensors, kept on the device, without a host
sync: every update runs the same operations, and an estimate that must not count gets the weight 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import ASGD, Adafactor, Optimizer, Rprop

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import value_error
from variable_batch_size.backend import Backend
from variable_batch_size.backend.base import scalar_dtype
from variable_batch_size.data.batches import Batch
from variable_batch_size.data.plan.state import NUMBER, check_entries
from variable_batch_size.optim.noise.estimate import (
    AVERAGES,
    HORIZON,
    Estimate,
    Gradient,
    Number,
    Vector,
    coefficients,
    debias,
    gain,
    select,
    update_averages,
)
from variable_batch_size.optim.scaling.scaling import scaling_if
from variable_batch_size.optim.stage import Counted, MeasuredSquares, Needs, Stage, UpdateUnderWay
from variable_batch_size.optim.tensors.arithmetic import is_narrow, local_parts, squared_norm, zero_unless
from variable_batch_size.optim.tensors.late import copy_later
from variable_batch_size.rules import ConstantTimescale, Noise, Rule


class Statistics(NamedTuple):
    """What the gradients of one update give for its estimate, over all ranks."""

    weighted_squares: Number  # S = sum_j n_j |g_j|^2
    squared_norm: Number  # |G|^2
    finite: bool | Tensor  # whether both are finite: a 0-D tensor on a device


class NoiseState(NamedTuple):
    """What is known of the noise after an update."""

    averages: Vector  # (4,), see `AVERAGES`
    gain: Number = 1.0  # AdaScale's gain of that update
    packed: Tensor | None = None  # (5,): averages and gain on a device, which one transfer reads


_SKIPPED = "Skipped an update: non-finite gradient; check the loss if this persists"


class PairEstimator(Protocol):
    """Compares the gradient of an update with that of the previous one, see `DifferencedEstimator`."""

    def has_previous(self, gradient: Gradient) -> bool:
        """Return whether there is a previous gradient of the same parameters."""

    def estimate(
        self, gradient: Gradient, square: Number, batch_size: Number, finite: bool | Tensor
    ) -> tuple[Estimate, Number]:
        """Return the estimate from this update and the previous one, and 1 if it is valid; keep this gradient."""

    def forget(self) -> None:
        """Drop the previous gradient."""

    def state_dict(self) -> dict[str, Any]:
        """Return the previous gradient, an empty dict if there is none."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a state is damaged."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; one without a previous gradient drops it."""


@final
class GradientNoise(Stage):
    """Measures sigma^2 and mu^2 at each update, and averages them over about `HORIZON` reference updates.

    The estimate e of an update enters as average = theta average + (1 - theta) e, with
    theta = max(0, 1 - (B / ref) / HORIZON). An average is divided by 1 - prod(theta), which corrects the bias of its
    start at 0. sigma^2 and mu^2 are averaged first and divided by each other afterwards.

    Args:
        backend: keeps numbers on a device, without a host sync, where the host does not read the parameters.
        parameters: one of them, at least.
        pairs: compares an update of a single microbatch with the previous one; without it, such an update gives no
            estimate.
    """

    name, by_microbatch = "squares", True
    compares_microbatches = reads_gradient = True

    def __init__(self, backend: Backend, parameters: Sequence[Tensor], pairs: PairEstimator | None = None) -> None:
        self.keeps_lr_on_device = not backend.reads(parameters[0])
        self._measured = False  # whether an update could give an estimate, as the host knows it
        self._cut = CutWarning()
        self._backend = backend
        self._pairs = pairs
        self._statistics: Statistics | None = None  # of the update under way
        self._squares: Tensor | None = None  # 0-D: sum of n_j |g_j|^2 over this rank's microbatches
        self._state = NoiseState(np.zeros(len(AVERAGES)))
        self._uncommitted: NoiseState | None = None

    def needs(self, batch: Batch | None) -> Needs:
        """Return that |g|^2 of each microbatch's gradient g is needed if an update has several microbatches."""
        return Needs(norm=self._backend.static_graph or batch is None or batch.num_microbatches > 1)

    def add(self, counted: Counted, squares: MeasuredSquares, like: Tensor) -> None:
        """Add n_j |g_j|^2 of a microbatch to the sum of the step; its gradient is g_j, and n_j its number of samples.

        `squares`: |g_j|^2, None if it was not measured, and n_j up to the weight of the loss, 0 for a replay.
        """
        square = squares.norm
        if square is None:
            return
        if squares.scale is not None:  # a GradScaler has multiplied the loss by it
            square = square / squares.scale.to(square.dtype).square()
        if self._squares is not None and not self._backend.static_graph:
            self._squares = torch.add(self._squares, square, alpha=squares.factor)
            return
        square = square * self._backend.scalar(squares.factor, square, "square")
        self._squares = square if self._squares is None else self._squares + square

    def part(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of S = sum_j n_j |g_j|^2 over the microbatches j, (1,), for the ranks to sum."""
        squares = like[0].new_zeros((), dtype=torch.float32) if self._squares is None else self._squares
        return [squares.to(scalar_dtype(like)).view(1)]

    def reduce(self, update: UpdateUnderWay) -> None:
        """Store S = sum_j n_j |g_j|^2, which the ranks have summed, and |G|^2 of the gradient of the update.

        Where the host may read numbers without delay they become floats, otherwise they stay 0-D tensors.
        """
        if not update.gradients:
            return
        (weighted_squares,) = update.message[self.name]  # (1,)
        squared_grad_norm = squared_norm(update.gradients)
        if self.keeps_lr_on_device:
            finite = weighted_squares[0] + squared_grad_norm < math.inf  # false for nan; no sum of squares is -inf
            self._statistics = Statistics(weighted_squares[0], squared_grad_norm, finite)
        else:
            numbers = weighted_squares.item(), squared_grad_norm.item()
            self._statistics = Statistics(*numbers, all(map(math.isfinite, numbers)))
        update.square = self._statistics.squared_norm

    def judge(self, update: UpdateUnderWay) -> None:
        """Skip an update, with a warning, if the host knows that its gradient is not finite."""
        if self._statistics is not None and self._statistics.finite is False and update.skipped is False:
            warnings.warn(_SKIPPED, RuntimeWarning, stacklevel=stacklevel_of_user())
            update.skip(True)

    def measure(self, update: UpdateUnderWay) -> None:
        """Pass the noise, including this update, to the rules. Zero the gradient if a device finds it not finite."""
        assert self._statistics is not None
        statistics = self._statistics
        if isinstance(statistics.finite, Tensor) and isinstance(update.skipped, Tensor):
            statistics = statistics._replace(finite=statistics.finite & ~update.skipped)  # a skipped one counts as not
        update.finite = statistics.finite
        if isinstance(update.finite, Tensor):
            zero_unless(update.finite, local_parts(update.gradients))
        update.asked = replace(update.asked, noise=self._include(statistics, update))

    def scale(self, update: UpdateUnderWay) -> None:
        """Make the learning rate and the progress 0 in an update that the device finds not finite, or skips."""
        if isinstance(update.finite, Tensor):
            made = update.finite.to(scalar_dtype(update.parameters))  # 1 if the update counts, else 0
            update.scalings = [
                scaling_if(made, scaling, self._backend, group) for group, scaling in enumerate(update.scalings)
            ]

    def _include(self, statistics: Statistics, update: UpdateUnderWay) -> Noise:
        """Return the noise averaged over the updates so far and this one, which is left out if it is not finite.

        On a device all numbers are tensors, and every update runs the same operations: what must not count is
        computed, too, and then not selected.
        """
        batch_size, groups, ref = update.batch.batch_size, update.batch.num_microbatches, update.asked.ref_batchsize
        gradient = [parameter.grad for parameter in update.parameters]
        # A single microbatch is compared with the previous update, if that is asked for.
        paired = groups == 1 and self._pairs is not None and self._pairs.has_previous(gradient)
        self._measured |= groups > 1 or paired
        one_minus_theta = min(1.0, batch_size / ref / HORIZON)  # weight of this update in the averages
        weights = coefficients(batch_size, groups, one_minus_theta, paired=paired)
        weighted_squares, squared_grad_norm, is_included = statistics
        like = torch.as_tensor(squared_grad_norm)
        numbers = [float(batch_size), float(ref), float(paired)]
        size, reference, use_pair = self._backend.scalars(numbers, like, "noise")
        # The averages are linear in the measurements: `rows` has the coefficients of each, (4,).
        measurements, rows = [weighted_squares, squared_grad_norm], [weights.weighted_squares, weights.squared_norm]
        if self._pairs is not None:
            pair_estimate, valid = self._pairs.estimate(gradient, squared_grad_norm, size, is_included)
            measurements += pair_estimate  # its sigma^2 and mu^2
            rows += [weights.pair_sigma2, weights.pair_mu2]
            is_included = is_included & (valid >= use_pair)  # an estimate that is used must be valid
        decay, constant, *factors = self._as_vectors([weights.decay, weights.constant, *rows], like, "noise")
        old = self._state.averages
        if self.keeps_lr_on_device and not isinstance(old, Tensor):
            (old,) = self._as_vectors([old.tolist()], like, "averages")
        new = update_averages(old, decay, constant, zip(factors, measurements, strict=True))
        averages = select(is_included, new, old)
        gain_of_update = gain(averages, size, reference)
        last_gain = select(statistics.finite, gain_of_update, self._state.gain)
        packed = torch.cat([averages, torch.as_tensor(last_gain).view(1)]) if self.keeps_lr_on_device else None
        self._uncommitted = NoiseState(averages, last_gain, packed)  # `end` keeps it if the update is made
        return debias(averages, gain_of_update)

    def _as_vectors(self, rows: Sequence[Sequence[float]], like: Tensor, place: str) -> Sequence[Any]:
        """Return rows of numbers as arrays, or as tensors on the device of `like` if the noise is kept there.

        `place`: a name by which a compiled graph finds the inputs that hold these numbers.
        """
        return self._backend.vectors(rows, like, place) if self.keeps_lr_on_device else list(np.array(rows))

    def end(self, update: UpdateUnderWay) -> None:
        """Keep the noise that was measured, now that the update is made; nothing was if the update was skipped."""
        if self._uncommitted is not None:
            self._state, self._uncommitted = self._uncommitted, None
            ranks = self._backend.world.size
            self._cut.after_update(update.batch, ranks, measured=self._measured)

    def clear(self) -> None:
        """Forget the microbatches of a step, after its update; if it starts over, also the noise of its update."""
        self._squares = self._statistics = None
        if self._uncommitted is not None:
            self._uncommitted = None
            self.forget()  # `measure` has overwritten the previous gradient

    def forget(self) -> None:
        """Drop the gradient of the update before: the next one may be of other parameters, so do not compare them."""
        if self._pairs is not None:
            self._pairs.forget()

    def reader(self) -> Callable[[], Noise]:
        """Return a function that returns the present noise; calling it later avoids a wait for the device."""
        read = _averages_and_gain_later(self._state)

        def read_noise() -> Noise:
            *averages, last_gain = read()
            return debias(np.array(averages), last_gain)

        return read_noise

    def noise(self) -> Noise:
        """Return the debiased averages, nan before the first estimate, and the last gain; reads them from a device."""
        return self.reader()()

    def state_dict(self) -> dict[str, Any]:
        """Return the averages of the noise as plain numbers, and the previous gradient if it is compared; waits."""
        numbers = _averages_and_gain_later(self._state)()
        state: dict[str, Any] = dict(zip((*AVERAGES, "gain"), numbers, strict=True))
        return {"noise": {**state, **(self._pairs.state_dict() if self._pairs is not None else {})}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the averages of the noise in a state are damaged, before anything is loaded."""
        if state.get("noise", {}) != {}:
            check_entries(state["noise"], dict.fromkeys((*AVERAGES, "gain"), NUMBER), "noise.")
            weight, numbers = state["noise"]["weight"], [state["noise"][name] for name in (*AVERAGES, "gain")]
            if not (all(map(math.isfinite, numbers)) and 0 <= weight <= 1 and state["noise"]["gain"] >= 0):
                raise value_error("the numbers of noise must be possible", numbers, "restore a state as it was saved")
            if self._pairs is not None:
                self._pairs.check_state(state["noise"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the averages of the noise from a state; one without them resets everything."""
        noise = state.get("noise") or {}
        averages = np.array([float(noise.get(name, 0)) for name in AVERAGES])
        self._state = NoiseState(averages, float(noise.get("gain", 1)))
        self._measured, self._uncommitted = noise.get("weight", 0) > 0, None
        if self._pairs is not None:
            self._pairs.load_state_dict(noise)


def _averages_and_gain_later(state: NoiseState) -> Callable[[], list[float]]:
    """Return a function that returns the averages and the gain as floats, by one transfer from a device."""
    averages, last_gain, packed = state
    if packed is None:  # they are floats already
        return lambda: [*averages.tolist(), float(last_gain)]
    read = copy_later(packed)
    return lambda: read().tolist()


_NOT_PROPORTIONAL_TO_LR = (ASGD, Adafactor, Rprop)  # optimizers whose parameter update is not

_IDLE = 50  # more updates with too few microbatches than with enough, after which the user is warned


@final
class CutWarning:
    """Warns once if most updates are cut into too few microbatches: for an estimate, or for all ranks."""

    def __init__(self) -> None:
        self._excess: int | None = 0  # of updates with too few microbatches over others since it was 0; None: warned

    def after_update(self, batch: Batch, ranks: int, *, measured: bool) -> None:
        """Count an update, and warn once if those with too few microbatches are in excess.

        `ranks`: their number. `measured`: whether there was an estimate of the noise, in this update or before.
        """
        if self._excess is None:
            return
        too_few = not measured or batch.num_microbatches < ranks
        self._excess = self._excess + 1 if too_few else max(0, self._excess - 1)
        if self._excess < _IDLE:
            return
        self._excess = None
        wanted = max(2, ranks)  # microbatches
        rows = math.ceil(batch.batch_size / wanted)  # so that there are no more than wanted: one round
        if math.ceil(batch.batch_size / rows) < wanted:  # as for 5 samples on 4 ranks
            rows = max(1, batch.batch_size // wanted)
        remedy = f"pass minibatch_size={rows} to the sampler"
        if not measured:
            message = (
                f"The gradient noise could not be estimated in the first {_IDLE} updates, because each had a single "
                f"microbatch, and until there is an estimate the gain is at most 1; {remedy}, or "
                f'noise="differenced" to the optimizer'
            )
        else:
            idle = ranks - batch.num_microbatches
            message = f"In most of the latest updates ranks were idle, in the last one {idle} of {ranks}; {remedy}"
        warnings.warn(message, UserWarning, stacklevel=stacklevel_of_user())


def check_measurable(inner: Optimizer, rules: Sequence[Rule], reference: int | None, backend: Backend) -> None:
    """Raise TypeError or ValueError unless the noise of the updates of an optimizer can be measured."""
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    if reference is None:
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
    if not backend.reads(parameters[0]):
        _check_deferred_lr(inner, parameters, rules)


def _check_deferred_lr(inner: Optimizer, parameters: Sequence[Tensor], rules: Sequence[Rule]) -> None:
    """Raise TypeError unless the factor on lr, which depends on the noise, can stay on the device.

    Parameters are then moved by the step with the user's lr, and back by 1 - factor of the way: see `DeferredLrFactor`.
    """
    device = parameters[0].device.type
    if isinstance(inner, _NOT_PROPORTIONAL_TO_LR):
        raise TypeError(
            f"on {device} a learning rate that depends on the noise needs an optimizer whose change is "
            f"proportional to it, unlike {type(inner).__name__}; use another inner optimizer"
        )
    narrow_dtypes = {str(parameter.dtype) for parameter in parameters if is_narrow(parameter)}
    if narrow_dtypes:
        raise TypeError(
            f"on {device} a learning rate that depends on the noise needs parameters of at least 32 bits, but some are "
            f"{' and '.join(sorted(narrow_dtypes))}; keep the parameters in float32, and use torch.autocast"
        )
    for rule in rules:
        if isinstance(rule, ConstantTimescale) and rule.needs_noise:
            raise TypeError(
                f"on {device} the weight decay must not depend on the noise, which the host does not read there, "
                f"but {rule} makes it depend on it; use the rule without ConstantTimescale"
            )
