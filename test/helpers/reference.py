"""Slow, readable float64 twins of what the package computes for speed, and the small training that both run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.splitting import split_batch
from variable_batch_size.data.shuffle import order
from variable_batch_size.optim.named import NamedOptimizer

Array = NDArray[np.float64]

REF = 64
SGD = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.01}

# Of each inner optimizer that has a twin. An eps that large keeps m / (sqrt(v) + eps) from making much of rounding.
ADAM = {"lr": 0.02, "betas": (0.85, 0.95), "eps": 0.01, "weight_decay": 0.1}
HYPERPARAMETERS: dict[Any, dict[str, Any]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.RMSprop: {"lr": 0.02, "alpha": 0.9, "eps": 0.01, "weight_decay": 0.1},
}


@dataclass(frozen=True)
class Update:
    """What an equation may look at."""

    k: float  # B / ref_batchsize
    u: int  # the number of the update; the first is 1
    epoch: float  # dataset_size / ref_batchsize: an epoch in updates at the reference
    gain: float = 1.0  # AdaScale's

    @staticmethod
    def of(batch_size: int, u: int, dataset_size: int, ref_batchsize: int = REF, gain: float = 1.0) -> Update:
        return Update(batch_size / ref_batchsize, u, dataset_size / ref_batchsize, gain)


@dataclass(frozen=True)
class Equation:
    """A class of the package: its factors, in the words of its paper, and how it is made."""

    factors: Callable[[Update], vbs.Scaling]
    inners: Sequence[type[torch.optim.Optimizer]] = (torch.optim.SGD, torch.optim.Adam)  # the first by default
    any_inner: bool = True  # whether it takes more than those
    options: dict[str, Any] = field(default_factory=dict)  # of the constructor
    noise: bool = False  # whether it depends on the microbatches


WARMUP = 5.5  # epochs

# The equations of the papers, written independently of the package. Every rule in `vbs.RULES` gets every test of
# test_contract.py: one that is not listed here is compared with what its own class returns.
EQUATIONS: dict[type[vbs.CustomOptimizer], Equation] = {
    vbs.ConstantOptimizer: Equation(lambda at: vbs.Scaling()),
    vbs.LinearRuleOptimizer: Equation(  # Goyal et al. 2017, section 2.1
        lambda at: vbs.Scaling(lr=at.k, progress=at.k)
    ),
    vbs.RootRuleOptimizer: Equation(  # Krizhevsky 2014, section 5
        lambda at: vbs.Scaling(lr=at.k**0.5, progress=at.k)
    ),
    vbs.LinearRuleMomentumOptimizer: Equation(  # Goyal et al. 2017, equation 9
        lambda at: vbs.Scaling(gradient=at.k, weight_decay=at.k, progress=at.k),
        inners=(torch.optim.SGD,),
        any_inner=False,
    ),
    vbs.SqrtSDERuleOptimizer: Equation(  # Malladi et al. 2022, section 5
        lambda at: vbs.Scaling(lr=at.k**0.5, one_minus_beta=at.k, eps=at.k**-0.5, progress=at.k),
        inners=(torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop),
        any_inner=False,
    ),
    vbs.LEGWRuleOptimizer: Equation(  # You et al. 2019: the root rule; a batch k times as large warms up k epochs for 1
        lambda at: vbs.Scaling(
            lr=at.k**0.5 * min(1, (at.u * at.k / at.epoch) / (at.k * WARMUP)),  # epochs gone, of epochs to go
            progress=at.k,
        ),
        options={"warmup_epochs": WARMUP},
    ),
    vbs.AdaScaleOptimizer: Equation(  # Johnson et al. 2020, section 3
        lambda at: vbs.Scaling(lr=at.gain, progress=at.gain), noise=True
    ),
    vbs.AdamScaleOptimizer: Equation(  # Qiao et al. 2021, section 3.2
        lambda at: vbs.Scaling(lr=at.gain**0.5, progress=at.gain),
        inners=(torch.optim.Adam, torch.optim.AdamW),
        noise=True,
    ),
}


def _own_equation(name: str) -> Equation:
    """The factors that the rule's own class returns."""
    rule = vbs.RULES[name]()

    def factors(at: Update) -> vbs.Scaling:
        return rule(vbs.RuleInput(round(at.k * REF), REF, at.u - 1, noise=vbs.Noise(1.0, 1.0, at.gain)))

    return Equation(factors, noise=bool(getattr(rule, "needs_noise", False)))


def _class_of(name: str) -> type[vbs.CustomOptimizer]:
    """The named optimizer of a rule, or one that is made here."""
    for kind in EQUATIONS:
        if kind.rule_name == name:  # type: ignore[attr-defined]
            return kind
    return type(f"{vbs.RULES[name].__name__}Optimizer", (NamedOptimizer,), {"rule_name": name})


OPTIMIZERS = {name: _class_of(name) for name in vbs.RULES}
EQUATIONS |= {kind: _own_equation(name) for name, kind in OPTIMIZERS.items() if kind not in EQUATIONS}
LINEAR = EQUATIONS[vbs.LinearRuleOptimizer]


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
    """Kingma & Ba 2015, algorithm 1, with betas that change: 1 - beta^t is 1 - the product of those that were used.

    `decoupled`: AdamW (Loshchilov & Hutter 2019, algorithm 2). `amsgrad` as in torch: the largest v, then corrected.
    """
    m, v, largest = ([np.zeros_like(w) for w in weights] for _ in range(3))
    product1 = product2 = 1.0
    for update in updates:
        gradients, by = update(weights)
        beta1, beta2 = (1 - by.one_minus_beta * (1 - beta) for beta in betas)
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
        moved = 1 - by.one_minus_beta * (1 - alpha)
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

    @staticmethod
    def estimate(groups: Sequence[tuple[int, Array]]) -> tuple[float, float]:
        """sigma^2 and mu^2 from two microbatches or more."""
        batch_size, number = sum(n for n, _ in groups), len(groups)
        whole = sum(n / batch_size * g for n, g in groups)
        mean_square = sum(n / batch_size * (g**2).sum() for n, g in groups)
        sigma2 = batch_size * (mean_square - (whole**2).sum()) / (number - 1)
        mu2 = (number * (whole**2).sum() - mean_square) / (number - 1)
        return sigma2, mu2

    def average(self, batch_size: int, sigma2: float, mu2: float) -> None:
        """Average first; the division by what is not 0 comes after."""
        theta = max(0.0, 1 - batch_size / self.ref / 1000)
        self.average_sigma2 = theta * self.average_sigma2 + (1 - theta) * sigma2
        self.average_mu2 = theta * self.average_mu2 + (1 - theta) * mu2
        self.product *= theta
        self.updates += 1

    def update(self, groups: Sequence[tuple[int, Array]]) -> float:
        """The gain of an update whose microbatches have so many samples and these mean gradients."""
        batch_size = sum(n for n, _ in groups)
        now = batch_size, sum(n / batch_size * g for n, g in groups)
        if len(groups) == 1 and self.differenced and self.earlier is not None:
            groups = [self.earlier, now]
        if len(groups) > 1:
            self.average(batch_size, *self.estimate(groups))
        self.earlier = now
        if self.updates == 0:
            return 1.0
        sigma2, mu2 = max(self.sigma2, 1e-6), max(self.mu2, 0.0)
        return float((sigma2 / self.ref + mu2) / (sigma2 / batch_size + mu2))


# ------------------------------------------------------------------------------------- the training with the package

SIZES = (20, 7, 1, 33, 12, 50, 3)


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
    """Any class of wrapper, with REF as its reference."""
    return kind(inner, sampler, **({"ref_batchsize": REF} | EQUATIONS.get(kind, LINEAR).options | options))


def training(
    kind: type[vbs.CustomOptimizer] = vbs.LinearRuleOptimizer,
    sizes: Sequence[int] = SIZES,
    dataset_size: int = 50,
    *,
    minibatch_size: int = 4,
    backend: vbs.Backend | None = None,
    dtype: torch.dtype = torch.float64,
    model: nn.Module | None = None,
    inner: Callable[..., torch.optim.Optimizer] | None = None,
    hyperparameters: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> Training:
    """A training whose trace holds its last size; `options` are the optimizer's, `sampling` the sampler's.

    `inner` is by default what the class goes around, with the hyperparameters that its twin has.
    """
    usual = EQUATIONS.get(kind, LINEAR).inners[0]
    inner = inner or usual
    hyperparameters = HYPERPARAMETERS.get(inner, HYPERPARAMETERS[usual]) if hyperparameters is None else hyperparameters
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
    factors: Callable[[Update], vbs.Scaling] | None = None,
    inner: type[torch.optim.Optimizer] | None = None,
    minibatch_size: int = 4,
    fixed_shape: bool = True,
    taken: list[vbs.Scaling] | None = None,
    **hyperparameters: Any,
) -> list[Array]:
    """The weights that `training(kind, sizes, dataset_size)` has to end with after all steps but the `skipped` ones.

    `factors`, `inner` and `hyperparameters` are by default the class's own; `taken` gets the factors of each update.
    """
    x, target = (tensor.to(dtype).double().numpy() for tensor in data(dataset_size))
    factors, inner = factors or EQUATIONS[kind].factors, inner or EQUATIONS[kind].inners[0]
    noise, taken = NoiseTwin(REF), [] if taken is None else taken

    def update(weights: list[Array], batch: NDArray[np.int64], u: int) -> tuple[list[Array], vbs.Scaling]:
        groups = [
            (len(samples), np.concatenate([g.ravel() for g in gradient(weights, x[samples], target[samples])]))
            for samples in split_batch(batch, minibatch_size, fixed_shape)
        ]
        taken.append(factors(Update.of(len(batch), u, dataset_size, gain=noise.update(groups))))
        return clipped(gradient(weights, x[batch], target[batch]), max_grad_norm), taken[-1]

    updates = (
        partial(update, batch=batch, u=step + 1)
        for step, batch in enumerate(batches(sizes, dataset_size, seed))
        if step not in skipped
    )
    start = [parameter.detach().double().numpy() for parameter in network(dtype).parameters()]
    return TWINS[inner](start, updates, **(HYPERPARAMETERS[inner] | hyperparameters))


def factors_along(kind: type[vbs.CustomOptimizer], sizes: Sequence[int], dataset_size: int = 50) -> list[vbs.Scaling]:
    """The factors of each update of `training(kind, sizes, dataset_size)`."""
    taken: list[vbs.Scaling] = []
    twin(kind, sizes, dataset_size, taken=taken)
    return taken


def assert_equal(found: Sequence[Array], expected: Sequence[Array], tolerance: float = 1e-12) -> None:
    """Relative to the largest weight."""
    largest = max(float(np.abs(array).max()) for array in expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest)


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found.pop("state"), expected.pop("state"), rtol=0, atol=0)
    assert found == expected
