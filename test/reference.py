"""Slow, readable float64 twins of what the package computes for speed, and the small training that both run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray
from torch import Tensor, nn

import variable_batch_size as vbs
from variable_batch_size.shuffle import order

Array = NDArray[np.float64]

# k = B / ref_batchsize -> (factor on the learning rate, factor on what enters the velocity), by class.
# A class that stands here gets every test of test_contract.py.
EQUATIONS: dict[type[vbs.CustomOptimizer], Callable[[float], tuple[float, float]]] = {
    vbs.ConstantOptimizer: lambda k: (1.0, 1.0),
    vbs.LinearRuleOptimizer: lambda k: (k, 1.0),  # Goyal et al. 2017, section 2.1
    vbs.RootRuleOptimizer: lambda k: (k**0.5, 1.0),  # Krizhevsky 2014, section 5
    vbs.LinearRuleMomentumOptimizer: lambda k: (1.0, k),  # Goyal et al. 2017, equation 9
}


def examples(number: int) -> settings:
    """Hypothesis, the same every time."""
    return settings(
        max_examples=number, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


# --------------------------------------------------------------------------------------------------------- the twin


def batches(sizes: Sequence[int], dataset_size: int, seed: int = 0) -> Iterator[NDArray[np.int64]]:
    """The samples of each update, one array for each: epochs follow one another along `sizes`, to its end."""
    step = epoch = 0
    while step < len(sizes):
        samples = order(dataset_size, seed, epoch)(np.arange(dataset_size))
        used = 0
        while used < dataset_size and step < len(sizes):
            yield samples[used : used + sizes[step]]  # the epoch's last one is shortened to what is left
            used += sizes[step]
            step += 1
        epoch += 1


def gradient(weights: Sequence[Array], x: Array, target: Array) -> list[Array]:
    """Of the mean over one big batch of |f(x) - target|^2, where f(x) = W tanh(V x + a) + b."""
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


def trained(
    kind: type[vbs.CustomOptimizer],
    weights: list[Array],
    steps: Iterator[tuple[Array, Array]],
    *,
    ref_batchsize: int,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
) -> list[Array]:
    """Weights after plain SGD with one big batch (x, target) an update."""
    velocity = [np.zeros_like(w) for w in weights]
    for x, target in steps:
        on_lr, on_gradient = EQUATIONS[kind](len(x) / ref_batchsize)
        whole = clipped(gradient(weights, x, target), max_grad_norm)
        entering = [on_gradient * (g + weight_decay * w) for g, w in zip(whole, weights, strict=True)]
        velocity = [momentum * u + e for u, e in zip(velocity, entering, strict=True)]
        weights = [w - on_lr * lr * u for w, u in zip(weights, velocity, strict=True)]
    return weights


class NoiseTwin:
    """The gradient's noise and AdaScale's gain (Johnson et al. 2020), one update at a time."""

    def __init__(self, ref_batchsize: int) -> None:
        self.ref = ref_batchsize
        self.updates = 0
        self.average_sigma2 = self.average_mu2 = 0.0  # drawn to 0 by what they began with
        self.product = 1.0  # of all thetas: how much of the 0 is left

    @property
    def sigma2(self) -> float:
        """Variance of one sample's gradient."""
        return self.average_sigma2 / (1 - self.product)

    @property
    def mu2(self) -> float:
        """Squared norm of the true gradient."""
        return self.average_mu2 / (1 - self.product)

    def update(self, groups: Sequence[tuple[int, Array]]) -> float:
        """The gain of an update whose microbatches have so many samples and these mean gradients."""
        batch_size, number = sum(n for n, _ in groups), len(groups)
        whole = sum(n / batch_size * g for n, g in groups)
        mean_square = sum(n / batch_size * (g**2).sum() for n, g in groups)
        if number > 1:
            sigma2 = batch_size * (mean_square - (whole**2).sum()) / (number - 1)
            mu2 = (number * (whole**2).sum() - mean_square) / (number - 1)
            theta = max(0.0, 1 - batch_size / self.ref / 1000)
            self.average_sigma2 = theta * self.average_sigma2 + (1 - theta) * sigma2
            self.average_mu2 = theta * self.average_mu2 + (1 - theta) * mu2
            self.product *= theta
            self.updates += 1
        if self.updates == 0:
            return 1.0
        sigma2, mu2 = max(self.sigma2, 1e-6), max(self.mu2, 0.0)
        return float((sigma2 / self.ref + mu2) / (sigma2 / batch_size + mu2))


# ------------------------------------------------------------------------------------- the training with the package

SIZES = (20, 7, 1, 33, 12, 50, 3)
REF = 64
SGD = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.01}


@dataclass
class Training:
    """What a user's script holds."""

    model: nn.Module
    sampler: vbs.CustomSampler
    optimizer: vbs.CustomOptimizer
    x: Tensor
    target: Tensor

    def loss(self, indices: Sequence[int]) -> Tensor:
        rows = (self.model(self.x[indices]) - self.target[indices]).square().sum(dim=1)
        return rows.mean() if self.optimizer.reduction == "mean" else rows.sum()

    def turns(self) -> Iterator[bool]:
        """Go through the rest of the epoch; yields what `optimizer.step()` returned, microbatch by microbatch."""
        for indices in self.sampler:
            self.loss(indices).backward()
            yield self.optimizer.step()

    def run(self, updates: int) -> Training:
        """Go on for so many updates, over as many epochs as it takes."""
        while updates:
            if len(self.sampler) == 0:
                epoch = self.optimizer.epoch + 1
                self.sampler.set_epoch(epoch)
                self.optimizer.set_epoch(epoch)
            for updated in self.turns():
                updates -= updated
                if updates == 0:
                    break
        return self

    def weights(self) -> list[Array]:
        return [parameter.detach().double().numpy() for parameter in self.model.parameters()]


def data(number: int) -> tuple[Tensor, Tensor]:
    """Float64 samples: x, (number, 3), and target, (number, 2)."""
    rng = np.random.default_rng(7)
    return torch.from_numpy(rng.normal(size=(number, 3))), torch.from_numpy(rng.normal(size=(number, 2)))


def filled(model: nn.Module) -> nn.Module:
    """The model with weights that are always the same; torch's generator is shared by ranks that are threads."""
    rng = np.random.default_rng(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(size=parameter.shape) / 2))
    return model


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """f(x) = W tanh(V x + a) + b."""
    return filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()).to(dtype)


def wrap(
    kind: type[vbs.CustomOptimizer], inner: torch.optim.Optimizer, sampler: vbs.CustomSampler, **options: Any
) -> vbs.CustomOptimizer:
    """Any class of wrapper; `ref_batchsize` is REF where it takes one."""
    reference = {} if kind is vbs.ConstantOptimizer else {"ref_batchsize": REF}
    return kind(inner, sampler, **(reference | options))


def training(
    kind: type[vbs.CustomOptimizer] = vbs.LinearRuleOptimizer,
    sizes: Sequence[int] = SIZES,
    dataset_size: int = 50,
    *,
    minibatch_size: int = 4,
    backend: vbs.Backend | None = None,
    dtype: torch.dtype = torch.float64,
    model: nn.Module | None = None,
    inner: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    hyperparameters: dict[str, Any] = SGD,
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> Training:
    """A training whose trace holds its last size; `options` are the optimizer's, `sampling` the sampler's."""
    backend = backend or vbs.LocalBackend()
    model = model or network(dtype)
    sampler = vbs.CustomSampler(
        dataset_size,
        list(sizes),
        backend.world.size,
        backend.world.rank,
        minibatch_size,
        **{"on_end": "hold", **(sampling or {})},
    )
    x, target = (tensor.to(dtype) for tensor in data(dataset_size))
    optimizer = wrap(kind, inner(model.parameters(), **hyperparameters), sampler, backend=backend, **options)
    return Training(model, sampler, optimizer, x, target)


def twin(
    kind: type[vbs.CustomOptimizer],
    sizes: Sequence[int],
    dataset_size: int = 50,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    max_grad_norm: float | None = None,
    skipped: Collection[int] = (),
) -> list[Array]:
    """The weights that `training(kind, sizes, dataset_size)` has to end with after all steps but the `skipped` ones."""
    x, target = (tensor.to(dtype).double().numpy() for tensor in data(dataset_size))
    taken = (batch for step, batch in enumerate(batches(sizes, dataset_size, seed)) if step not in skipped)
    steps = ((x[batch], target[batch]) for batch in taken)
    start = [parameter.detach().double().numpy() for parameter in network(dtype).parameters()]
    return trained(kind, start, steps, ref_batchsize=REF, max_grad_norm=max_grad_norm, **SGD)


def assert_equal(found: Sequence[Array], expected: Sequence[Array], tolerance: float = 1e-12) -> None:
    """Relative to the largest weight."""
    largest = max(float(np.abs(array).max()) for array in expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest)
