"""Slow, readable float64 twins: the gradient of one big batch, torch's optimizers with changing factors, the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import variable_batch_size as vbs

Array = NDArray[np.float64]


def gradient(weights: Sequence[Array], x: Array, target: Array) -> list[Array]:
    """The gradient of the mean over one big batch of |f(x) - target|^2, where f(x) = W tanh(V x + a) + b."""
    v, a, w, b = weights
    hidden = np.tanh(x @ v.T + a)
    error = 2 * (hidden @ w.T + b - target) / len(x)
    back = (error @ w) * (1 - hidden**2)
    return [back.T @ x, back.sum(axis=0), error.T @ hidden, error.sum(axis=0)]


def clipped(gradients: list[Array], max_norm: float | None) -> list[Array]:
    """g min(1, max_norm / |g|), where |g| is the norm over all parameters; the 1e-6 is PyTorch's."""
    if max_norm is None:
        return gradients
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    return [g * min(1.0, max_norm / (norm + 1e-6)) for g in gradients]


# Of each update: weights -> their gradients, and the factors.
Updates = Iterable[Callable[[list[Array]], tuple[list[Array], vbs.Scaling]]]


def sgd(
    weights: list[Array], updates: Updates, *, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
) -> list[Array]:
    """u = m u + g + decay w, w -= lr u."""
    velocity = [np.zeros_like(w) for w in weights]
    for update in updates:
        gradients, by = update(weights)
        decay = by.weight_decay * weight_decay
        entering = [by.gradient * g + decay * w for g, w in zip(gradients, weights, strict=True)]
        velocity = [momentum * u + e for u, e in zip(velocity, entering, strict=True)]
        weights = [w - by.lr * lr * u for w, u in zip(weights, velocity, strict=True)]
    return weights


def adam(
    weights: list[Array],
    updates: Updates,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    amsgrad: bool = False,
    maximize: bool = False,
) -> list[Array]:
    """Kingma & Ba 2015, algorithm 1, with betas that change: 1 - beta^t becomes 1 - the product of past betas.

    `decoupled`: AdamW (Loshchilov & Hutter 2019, algorithm 2). `amsgrad` as in torch: the largest v, then corrected.
    """
    m, v, largest = ([np.zeros_like(w) for w in weights] for _ in range(3))
    product1 = product2 = 1.0
    for update in updates:
        gradients, by = update(weights)
        beta1, beta2 = (1 - by.one_minus_beta * (1 - beta) for beta in betas)
        beta2 **= by.beta2_power
        rate, decay = by.lr * lr, by.weight_decay * weight_decay
        gradients = [by.gradient * (-g if maximize else g) for g in gradients]
        if decoupled:
            weights = [w - rate * decay * w for w in weights]
        else:
            gradients = [g + decay * w for g, w in zip(gradients, weights, strict=True)]
        m = [beta1 * old + (1 - beta1) * g for old, g in zip(m, gradients, strict=True)]
        v = [beta2 * old + (1 - beta2) * g**2 for old, g in zip(v, gradients, strict=True)]
        largest = [np.maximum(old, new) for old, new in zip(largest, v, strict=True)]
        product1, product2 = product1 * beta1, product2 * beta2
        means = [average / (1 - product1) for average in m]
        squares = [average / (1 - product2) for average in (largest if amsgrad else v)]
        weights = [
            w - rate * mean / (np.sqrt(square) + by.eps * eps)
            for w, mean, square in zip(weights, means, squares, strict=True)
        ]
    return weights


def rmsprop(
    weights: list[Array], updates: Updates, *, lr: float, alpha: float, eps: float, weight_decay: float = 0.0
) -> list[Array]:
    """v = alpha v + (1 - alpha) g^2, w -= lr g / (sqrt(v) + eps)."""
    v = [np.zeros_like(w) for w in weights]
    for update in updates:
        gradients, by = update(weights)
        moved = (1 - by.one_minus_beta * (1 - alpha)) ** by.beta2_power
        decay = by.weight_decay * weight_decay
        gradients = [by.gradient * g + decay * w for g, w in zip(gradients, weights, strict=True)]
        v = [moved * old + (1 - moved) * g**2 for old, g in zip(v, gradients, strict=True)]
        weights = [
            w - by.lr * lr * g / (np.sqrt(square) + by.eps * eps)
            for w, g, square in zip(weights, gradients, v, strict=True)
        ]
    return weights


TWINS: dict[Any, Callable[..., list[Array]]] = {
    torch.optim.SGD: sgd,
    torch.optim.Adam: adam,
    torch.optim.AdamW: partial(adam, decoupled=True),
    torch.optim.RMSprop: rmsprop,
}


class NoiseTwin:
    """The gradient's noise and AdaScale's gain (Johnson et al. 2020), one update at a time."""

    def __init__(self, ref_batchsize: int, differenced: bool = False) -> None:
        self.ref = ref_batchsize
        self.differenced = differenced
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
        if self.updates == 0:
            return min(1.0, batch_size / self.ref)
        sigma2, mu2 = max(self.sigma2, 0.0), max(self.mu2, 0.0)
        if sigma2 + mu2 == 0:
            return min(1.0, batch_size / self.ref)
        return float((sigma2 / self.ref + mu2) / (sigma2 / batch_size + mu2))
