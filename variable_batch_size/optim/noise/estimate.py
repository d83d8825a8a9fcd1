"""The equations of the gradient noise: estimates of sigma^2 and mu^2, their averages over updates, AdaScale's gain.

sigma^2 is the variance of the gradient of one sample (the trace of its covariance), and mu^2 the squared norm of the
true gradient. Neither depends on the batch size, the microbatch size or the world, so nothing is rescaled when those
change. Pure functions of `Number`s and `Vector`s: floats and arrays, or tensors on a device, which the host does not
read. There the operations of an update are few, because a number costs as much to trace as a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from variable_batch_size.rules import Noise, adascale_gain
from variable_batch_size.rules.adascale import measured_gain

Number: TypeAlias = float | Tensor
Vector: TypeAlias = NDArray[np.float64] | Tensor
Gradient: TypeAlias = Sequence[Tensor | None]  # of each parameter; None counts as 0

HORIZON = 1000  # number of updates at the reference over which the averages extend


class Estimate(NamedTuple):
    """An unbiased estimate of sigma^2 and mu^2 from one update, or from two consecutive ones."""

    sigma2: Number
    mu2: Number


def estimate_from_groups(
    weighted_squares: Any, squared_norm: Any, batch_size: Any, groups: Any, inverse_dof: Any
) -> Estimate:
    """Estimate the noise from the J >= 2 microbatches of an update.

    sigma^2 = (S - B |G|^2) / (J - 1) and mu^2 = (J |G|^2 - S / B) / (J - 1). Arguments are numbers or arrays.

    S = sum_j n_j |g_j|^2 is `weighted_squares`, and G = sum_j (n_j / B) g_j. `inverse_dof` is 1 / (J - 1); 0 if J = 1,
    which makes the estimate 0.

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
    3.1: consecutive gradients of a single replica). Arguments are numbers or arrays.
    """
    total = batch_size + previous_batch_size
    sigma2 = batch_size * previous_batch_size / total * squared_difference
    mu2 = (batch_size * squared_norm + previous_batch_size * previous_squared_norm - 2 * sigma2) / total
    return Estimate(sigma2, mu2)


AVERAGES = ("sigma2", "mu2", "weight", "updates")
"""The entries of the averages, (4,): sums over updates, in which the estimate of an update has weight
(1 - theta) prod(theta of later updates); the sum of these weights, 1 - prod(theta); and the number of estimates.
"""


class Coefficients(NamedTuple):
    """By what an update changes the averages, apart from its measurements; each (4,), see `update_averages`.

    new averages = decay * old averages + constant + sum over measurements of (coefficient * measurement)
    """

    decay: Any
    constant: Any
    weighted_squares: Any  # coefficient of S
    squared_norm: Any  # coefficient of |G|^2
    pair_sigma2: Any  # coefficients of the estimate from two consecutive updates
    pair_mu2: Any


def coefficients(batch_size: int, groups: int, one_minus_theta: float, *, paired: bool) -> Coefficients:
    """Return how the averages of sigma^2 and mu^2 change by an update, as coefficients of what it measures.

    They include `estimate_from_groups` if the update has several microbatches, or `estimate_from_pair` if it is
    compared with the update before. Otherwise the averages stay as they are.

    Args:
        batch_size: samples of the update.
        groups: number of its microbatches, over all ranks.
        one_minus_theta: weight of the estimate in the averages.
        paired: whether the update is compared with the update before.
    """
    weight = one_minus_theta if groups > 1 or paired else 0.0
    pair_weight = weight if paired else 0.0
    inverse_dof = 1 / (groups - 1) if groups > 1 else 0.0  # one over the degrees of freedom of the variance
    # The estimate is linear in S and |G|^2: with one of them 1 and the other 0, it is the coefficient of that one.
    units = (1.0, 0.0), (0.0, 1.0)
    of_squares, of_norm = (estimate_from_groups(*unit, batch_size, groups, inverse_dof) for unit in units)
    return Coefficients(
        decay=(1 - weight, 1 - weight, 1 - weight, 1.0),  # of sigma^2, mu^2, the sum of weights, and the number
        constant=(0.0, 0.0, weight, float(weight > 0)),
        weighted_squares=(weight * of_squares.sigma2, weight * of_squares.mu2, 0.0, 0.0),
        squared_norm=(weight * of_norm.sigma2, weight * of_norm.mu2, 0.0, 0.0),
        pair_sigma2=(pair_weight, 0.0, 0.0, 0.0),
        pair_mu2=(0.0, pair_weight, 0.0, 0.0),
    )


def update_averages(old: Any, decay: Any, constant: Any, terms: Iterable[tuple[Any, Number]]) -> Any:
    """Return the averages of the noise, including the estimate of one more update.

    new = decay * old + constant + sum_i coefficient_i * measurement_i, element by element. This is theta * average +
    (1 - theta) * estimate, because an estimate is linear in what an update measures, such as |G|^2.

    Args:
        old: the averages before, (4,): of sigma^2 and mu^2, their sum of weights, and the number of estimates.
        decay: theta, for each of the four; see `coefficients`, which returns all factors.
        constant: what is added to each of the four, whatever was measured.
        terms: pairs of (coefficient, (4,); measurement, a number).
    """
    new = decay * old + constant
    for coefficient, measurement in terms:
        new = new + coefficient * measurement
    return new


def gain(averages: Vector, batch_size: Number, ref: Number) -> Number:
    """Return AdaScale's gain (sigma^2 / ref + mu^2) / (sigma^2 / B + mu^2), where B is `batch_size`.

    It is min(1, B / ref) before the first estimate, and if all gradients were 0. Negative averages count as 0. There is
    no other bound: the gain does not depend on the scale of the loss.
    """
    ratio = batch_size / ref
    # Dividing by the sum of both keeps the quotients of small numbers from underflowing.
    if isinstance(averages, Tensor):
        sigma2, mu2 = averages[:2].clamp(min=0).unbind()  # 0-D: a TPU starts no kernel for them; 0 at first
        total = sigma2 + mu2
        bound = ratio.clamp(max=1) if isinstance(ratio, Tensor) else min(1.0, ratio)
        return torch.where(total > 0, adascale_gain(sigma2 / total, mu2 / total, batch_size, ref), bound)
    sigma2, mu2 = averages[:2].tolist()
    return measured_gain(sigma2, mu2, float(batch_size), float(ref))


def debias(averages: Vector, own_gain: Number) -> Noise:
    """Return the averages divided by their weight, which corrects their start at 0; nan before the first estimate."""
    if isinstance(averages, Tensor):
        sigma2, mu2 = (averages[:2] / averages[2]).unbind()
        return Noise(sigma2, mu2, own_gain, averages[3])
    sigma2, mu2, weight, updates = averages.tolist()
    weight = weight or math.nan
    return Noise(sigma2 / weight, mu2 / weight, own_gain, int(updates))


def select(condition: bool | Tensor, new: Any, old: Any) -> Any:
    """Return `new` if `condition` is true, else `old`; a tensor is not read by the host."""
    return torch.where(condition, new, old) if isinstance(condition, Tensor) else new if condition else old
