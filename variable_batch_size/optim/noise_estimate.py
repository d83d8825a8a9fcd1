"""The equations of the gradient noise: estimates of sigma^2 and mu^2, their averages over updates, AdaScale's gain.

sigma^2 is the variance of the gradient of one sample (the trace of its covariance), and mu^2 the squared norm of the
true gradient. Neither depends on the batch size, the microbatch size or the world, so nothing is rescaled when those
change. Pure functions of `Number`s: floats, or 0-D tensors on a device, which the host does not read.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from variable_batch_size.rules import Noise, adascale_gain

Number: TypeAlias = float | Tensor

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
    3.1: consecutive gradients of a single replica). Arguments are numbers or arrays.

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


class RunningAverages(NamedTuple):
    """Sums over updates, in which the estimate of an update has weight (1 - theta) prod(theta of later updates)."""

    sigma2: Number = 0.0
    mu2: Number = 0.0
    weight: Number = 0.0  # sum of the weights: 1 - prod(theta)
    updates: Number = 0.0  # number of updates that gave an estimate


def averaged(old: RunningAverages, estimate: Estimate, weight: Number, count: Number) -> RunningAverages:
    """Return the averages including one more estimate: average = (1 - weight) average + weight estimate.

    Args:
        old: the averages before.
        estimate: the estimate.
        weight: 1 - theta; 0 if the estimate does not count.
        count: 1, or 0 if the estimate does not count.
    """
    theta = 1 - weight
    return RunningAverages(
        theta * old.sigma2 + weight * estimate.sigma2,
        theta * old.mu2 + weight * estimate.mu2,
        theta * old.weight + weight,
        old.updates + count,
    )


def debiased(averages: RunningAverages, gain: Number) -> Noise:
    """Return the averages divided by their weight, which corrects their start at 0; nan before the first estimate."""
    sigma2, mu2, weight, updates = averages
    if not isinstance(weight, Tensor):
        weight = weight or math.nan
    return Noise(sigma2 / weight, mu2 / weight, gain, updates)


def gain(averages: RunningAverages, batch_size: Number, ref: Number) -> Number:
    """Return AdaScale's gain; min(1, B / ref) before the first estimate, and if all gradients were 0.

    Negative averages count as 0. There is no other bound: the gain does not depend on the scale of the loss.

    Args:
        averages: the averages.
        batch_size: B, in samples.
        ref: reference batch size, in samples.
    """
    sigma2, mu2, weight, _ = averages
    ratio = batch_size / ref
    # Dividing by the sum of both keeps the quotients of small numbers from underflowing.
    if isinstance(weight, Tensor):
        sigma2, mu2 = (torch.as_tensor(average).clamp(min=0) for average in (sigma2, mu2))
        total = sigma2 + mu2
        measured = (weight > 0) & (total > 0)
        total = torch.where(measured, total, 1.0)
        known = adascale_gain(torch.where(measured, sigma2 / total, 1.0), mu2 / total, batch_size, ref)
        return torch.where(measured, known, ratio.clamp(max=1) if isinstance(ratio, Tensor) else min(1.0, ratio))
    variance, square = max(float(sigma2), 0.0), max(float(mu2), 0.0)
    both = variance + square
    if weight == 0 or both == 0:
        return min(1.0, float(ratio))
    return float(adascale_gain(variance / both, square / both, batch_size, ref))


def select(finite: bool | Tensor, new: Number, old: Number) -> Number:
    """Return `old` if the tensor `finite` is false, without a host sync, and `new` otherwise."""
    return torch.where(finite, new, old) if isinstance(finite, Tensor) else new
