"""The slow, readable float64 twin of a training: torch's optimizers as equations, the noise, and one update of them.

Only the gradients are not here: `reference` derives them by hand, `fuzz.twin` and `yardstick` take torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

import variable_batch_size as vbs

Array = NDArray[np.float64]
Gradients: TypeAlias = Mapping[Any, Array]  # name of the parameter -> gradient; those without one are missing
Rule: TypeAlias = Callable[[float, float], vbs.rules.Scaling]  # of AdaScale's gain and B_noise
State: TypeAlias = dict[str, Any]  # of one parameter


# ------------------------------------------------------------------------------------------------- the inner optimizers


def sgd(
    w: Array, g: Array, state: State, *, lr: float, momentum: float = 0, weight_decay: float = 0, nesterov: bool = False
) -> Array:
    """u = m u + g + decay w, w -= lr u."""
    g = g + weight_decay * w
    state["u"] = u = momentum * state.get("u", 0.0) + g
    return w - lr * (g + momentum * u if nesterov else u)


def adam(
    w: Array,
    g: Array,
    state: State,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    amsgrad: bool = False,
    maximize: bool = False,
    excess: Array | float = 0.0,
) -> Array:
    """Kingma & Ba 2015, algorithm 1, with betas that change: 1 - beta^t becomes 1 - the product of past betas.

    `decoupled`: AdamW (Loshchilov & Hutter 2019, algorithm 2). `amsgrad` as in torch: the largest v, then corrected.
    `excess` is added to the square of the gradient, see `excess_squares`.
    """
    g = -g if maximize else g
    if decoupled:
        w = w - lr * weight_decay * w
    else:
        g = g + weight_decay * w
    for moment, power, beta in (("m", g, betas[0]), ("v", g**2 + excess, betas[1])):
        state[moment] = beta * state.get(moment, 0.0) + (1 - beta) * power
        state[f"product {moment}"] = state.get(f"product {moment}", 1.0) * beta
    state["largest"] = np.maximum(state.get("largest", 0.0), state["v"])
    mean = state["m"] / (1 - state["product m"])
    square = state["largest" if amsgrad else "v"] / (1 - state["product v"])
    return w - lr * mean / (np.sqrt(square) + eps)


def rmsprop(
    w: Array,
    g: Array,
    state: State,
    *,
    lr: float,
    alpha: float,
    eps: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Array:
    """v = alpha v + (1 - alpha) g^2, u = m u + g / (sqrt(v) + eps), w -= lr u."""
    g = g + weight_decay * w
    state["v"] = alpha * state.get("v", 0.0) + (1 - alpha) * g**2
    state["u"] = momentum * state.get("u", 0.0) + g / (np.sqrt(state["v"]) + eps)
    return w - lr * state["u"]


def adagrad(
    w: Array, g: Array, state: State, *, lr: float, lr_decay: float, eps: float, weight_decay: float = 0.0
) -> Array:
    """v = v + g^2, w -= lr / (1 + (t - 1) lr_decay) g / (sqrt(v) + eps)."""
    g = g + weight_decay * w
    state["v"] = state.get("v", 0.0) + g**2
    state["t"] = state.get("t", 0) + 1
    return w - lr / (1 + (state["t"] - 1) * lr_decay) * g / (np.sqrt(state["v"]) + eps)


TWINS: dict[Any, Callable[..., Array]] = {
    torch.optim.SGD: sgd,
    torch.optim.Adam: adam,
    torch.optim.AdamW: partial(adam, decoupled=True),
    torch.optim.RMSprop: rmsprop,
    torch.optim.Adagrad: adagrad,
}


class InnerTwin:
    """The twin of a class of torch, whose hyperparameters each update multiplies by the factors of their group.

    A parameter without a gradient is left alone, as torch does. The weights, by name, are changed in place; a group has
    names and hyperparameters.
    """

    def __init__(
        self, kind: Any, weights: Mapping[Any, Array], groups: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
    ) -> None:
        self.equation, self.weights, self.groups = TWINS[kind], weights, groups
        self.states: dict[Any, State] = {name: {} for name in weights}

    def step(self, gradients: Gradients, factors: Sequence[vbs.rules.Scaling], excess: Gradients | None = None) -> None:
        """Update the weights."""
        for (names, reference), by in zip(self.groups, factors, strict=True):
            now = scaled(reference, by)
            for name in names:
                if name in gradients:
                    w, g = self.weights[name], by.gradient * gradients[name]
                    own = {"excess": excess[name]} if excess and name in excess else {}
                    w[...] = self.equation(w, g, self.states[name], **now, **own)


def scaled(reference: Mapping[str, Any], by: vbs.rules.Scaling) -> dict[str, Any]:
    """The hyperparameters of an update."""
    values = dict(reference)
    values["lr"] *= by.lr
    values["weight_decay"] = values.get("weight_decay", 0.0) * by.weight_decay
    if "eps" in values:
        values["eps"] *= by.eps
    if "betas" in values:
        beta1, beta2 = (1 - by.one_minus_beta * (1 - beta) for beta in values["betas"])
        values["betas"] = beta1**by.beta1_power, beta2**by.beta2_power
    if "alpha" in values:
        values["alpha"] = (1 - by.one_minus_beta * (1 - values["alpha"])) ** by.beta2_power
    return values


# ------------------------------------------------------------------------------------------------------------ the noise


class NoiseTwin:
    """The gradient's noise and AdaScale's gain (Johnson et al. 2020), one update at a time.

    `differenced`: whether an update of one microbatch is compared with the update before.
    """

    def __init__(self, ref_batchsize: int, differenced: bool = False) -> None:
        self.ref, self.differenced = ref_batchsize, differenced
        self.earlier: tuple[int, Array] | None = None  # samples and gradient of the last update
        self.updates = 0
        self.average_sigma2 = self.average_mu2 = 0.0  # biased towards 0, the initial value
        self.product = 1.0  # of all thetas: the weight of the initial value

    @property
    def sigma2(self) -> float:
        """Variance of one sample's gradient."""
        return self.average_sigma2 / (1 - self.product)

    @property
    def mu2(self) -> float:
        """Squared norm of the true gradient."""
        return self.average_mu2 / (1 - self.product)

    @property
    def noise_scale(self) -> float:
        """B_noise, in samples; nan before the first estimate."""
        if self.updates == 0:
            return math.nan
        sigma2, mu2 = max(self.sigma2, 0.0), max(self.mu2, 0.0)
        return sigma2 / mu2 if mu2 > 0 else math.inf

    @staticmethod
    def estimate(groups: Sequence[tuple[int, Array]]) -> tuple[float, float]:
        """sigma^2 and mu^2 from at least two microbatches."""
        batch_size, number = sum(n for n, _ in groups), len(groups)
        whole = sum(n / batch_size * g for n, g in groups)
        mean_square = sum(n / batch_size * (g**2).sum() for n, g in groups)
        sigma2 = batch_size * (mean_square - (whole**2).sum()) / (number - 1)
        mu2 = (number * (whole**2).sum() - mean_square) / (number - 1)
        return sigma2, mu2

    def average(self, batch_size: int, sigma2: float, mu2: float) -> None:
        """Average; the properties above correct the bias."""
        theta = max(0.0, 1 - batch_size / self.ref / 1000)
        self.average_sigma2 = theta * self.average_sigma2 + (1 - theta) * sigma2
        self.average_mu2 = theta * self.average_mu2 + (1 - theta) * mu2
        self.product *= theta
        self.updates += 1

    def update(self, groups: Sequence[tuple[int, Array]]) -> float:
        """The gain of an update, given the samples and the mean gradient of each microbatch."""
        batch_size = sum(n for n, _ in groups)
        now = batch_size, sum(n / batch_size * g for n, g in groups)
        if len(groups) == 1 and self.differenced and self.earlier is not None:
            groups = [self.earlier, now]
        if len(groups) > 1:
            self.average(batch_size, *self.estimate(groups))
        self.earlier = now
        early = min(1.0, batch_size / self.ref)  # before the first estimate
        if self.updates == 0:
            return early
        sigma2, mu2 = max(self.sigma2, 0.0), max(self.mu2, 0.0)
        if sigma2 + mu2 == 0:
            return early
        return float((sigma2 / self.ref + mu2) / (sigma2 / batch_size + mu2))


# ----------------------------------------------------------------------------------------------------------- one update


def clipped(gradients: Gradients, max_norm: float | None) -> Gradients:
    """g min(1, max_norm / |g|), where |g| is the norm over all parameters; the 1e-6 is PyTorch's."""
    if max_norm is None:
        return gradients
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    return {name: g * min(1.0, max_norm / (norm + 1e-6)) for name, g in gradients.items()}


def excess_squares(
    microbatches: Sequence[tuple[int, Gradients]], ref_batchsize: int, max_norm: float | None
) -> Gradients:
    """a (A - G^2): what batch-size-invariant Adam adds to the square of G, which is clipped afterwards."""
    size, number = sum(n for n, _ in microbatches), len(microbatches)
    names = {name for _, own in microbatches for name in own}
    whole = {name: sum(n / size * own[name] for n, own in microbatches if name in own) for name in names}
    mean_square = {name: sum(n / size * own[name] ** 2 for n, own in microbatches if name in own) for name in names}
    norm = np.sqrt(sum((g**2).sum() for g in whole.values()))
    clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    weight = (size / ref_batchsize - 1) / (number - 1) if size > ref_batchsize else 0.0
    return {name: weight * clip**2 * (mean_square[name] - whole[name] ** 2) for name in names}


@dataclass
class PlainTraining:
    """A training without ranks, microbatches and buffers: an update has one big batch."""

    weights: Mapping[Any, Array]  # by name
    step: Callable[..., None]  # updates them, given the gradients and the factors of each rule
    max_grad_norm: float | None = None  # before the factors
    noise: NoiseTwin | None = None  # None for rules that do not use it
    squares_at: int | None = None  # the reference of batch-size-invariant Adam; None for other rules
    squares_of: Sequence[Any] | None = None  # the parameters with that rule; None: all

    def update(
        self, gradients: Gradients, microbatches: Sequence[tuple[int, Gradients]], rules: Sequence[Rule]
    ) -> list[vbs.rules.Scaling]:
        """Make one update with the mean gradient of the batch; return the factors of each group's rule.

        The noise is measured from samples and mean gradient of each microbatch; one that is missing counts as 0.
        """
        gain = noise_scale = math.nan
        if self.noise is not None:
            gain = self.noise.update([(n, self.vector(own)) for n, own in microbatches])
            noise_scale = self.noise.noise_scale
        factors = [rule(gain, noise_scale) for rule in rules]
        own: list[Gradients] = []
        if self.squares_at is not None:
            excess = excess_squares(microbatches, self.squares_at, self.max_grad_norm)
            own = [{name: one for name, one in excess.items() if self.squares_of is None or name in self.squares_of}]
        self.step(clipped(gradients, self.max_grad_norm), factors, *own)
        return factors

    def vector(self, gradients: Gradients) -> Array:
        return np.concatenate([gradients.get(name, np.zeros_like(w)).ravel() for name, w in self.weights.items()])
