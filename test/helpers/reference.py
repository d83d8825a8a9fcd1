"""The equations of the rules, and a small training that runs with the package and with its slow twin."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.splitting import split_batch
from helpers.twins import Array, Gradients, InnerTwin, NoiseTwin, PlainTraining, Rule
from variable_batch_size.data.plan.shuffle import order
from variable_batch_size.optim.named import NamedOptimizer
from variable_batch_size.world import World

REF = 64
SGD = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.01}

# Of each inner optimizer that has a twin. A large eps keeps m / (sqrt(v) + eps) from amplifying rounding errors.
ADAM = {"lr": 0.02, "betas": (0.85, 0.95), "eps": 0.01, "weight_decay": 0.1}
HYPERPARAMETERS: dict[Any, dict[str, Any]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.RMSprop: {"lr": 0.02, "alpha": 0.9, "eps": 0.01, "weight_decay": 0.1},
}


@dataclass(frozen=True)
class Variables:
    """The variables of an equation."""

    k: float  # B / ref_batchsize
    u: int  # the number of the update; the first is 1
    epoch: float  # dataset_size / ref_batchsize: an epoch in updates at the reference
    gain: float = 1.0  # AdaScale's
    noise: float = math.nan  # B_noise / ref_batchsize; nan before the first estimate
    ref: float = REF  # ref_batchsize

    @staticmethod
    def of(
        batch_size: float,
        u: float,
        dataset_size: float,
        ref_batchsize: float = REF,
        gain: float = 1.0,
        noise_scale: float = math.nan,
    ) -> Variables:
        k, epoch = batch_size / ref_batchsize, dataset_size / ref_batchsize
        return Variables(k, u, epoch, gain, noise_scale / ref_batchsize, ref_batchsize)


def rule_at(factors: Callable[[Variables], vbs.rules.Scaling], *at: float) -> Rule:
    """The factors of an update, whose batch size, number and so on are those of `Update.of`, for the noise measured."""
    return lambda gain, noise_scale: factors(Variables.of(*at, gain=gain, noise_scale=noise_scale))


@dataclass(frozen=True)
class Equation:
    """The factors of an optimizer class, as its paper gives them, and the arguments to create it."""

    factors: Callable[[Variables], vbs.rules.Scaling]
    inners: Sequence[type[torch.optim.Optimizer]] = (torch.optim.SGD, torch.optim.Adam)  # the first by default
    any_inner: bool = True  # whether it accepts any inner optimizer
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the constructor
    noise: bool = False  # whether it measures the noise
    squares: bool = False  # whether it is batch-size-invariant Adam

    @property
    def depends_on_cut(self) -> bool:
        return self.noise or self.squares


WARMUP = 5.5  # epochs
EXPONENT = 0.3


def surge(at: Variables) -> float:
    """f(B) / f(ref), f(B) = 2 / (sqrt(B_noise / B) + sqrt(B / B_noise)), and its limits; sizes are those over ref."""
    if math.isnan(at.noise):
        return min(1, at.k) ** 0.5
    if at.noise in (0, math.inf):
        return at.k**0.5 if at.noise else at.k**-0.5
    f_of_k, f_of_1 = (2 / ((at.noise / size) ** 0.5 + (size / at.noise) ** 0.5) for size in (at.k, 1))
    return f_of_k / f_of_1


# The equations of the papers, written independently of the package. Every rule in `vbs.rules.RULES` gets every test of
# test_contract.py: one that is not listed here is compared with what its own class returns.
EQUATIONS: dict[type[vbs.CustomOptimizer], Equation] = {
    vbs.ConstantOptimizer: Equation(lambda at: vbs.rules.Scaling()),
    vbs.LinearRuleOptimizer: Equation(  # Goyal et al. 2017, section 2.1
        lambda at: vbs.rules.Scaling(lr=at.k, progress=at.k)
    ),
    vbs.RootRuleOptimizer: Equation(  # Krizhevsky 2014, section 5
        lambda at: vbs.rules.Scaling(lr=at.k**0.5, progress=at.k)
    ),
    vbs.PowerRuleOptimizer: Equation(
        lambda at: vbs.rules.Scaling(lr=at.k**EXPONENT, progress=at.k), options={"exponent": EXPONENT}
    ),
    vbs.LinearRuleMomentumOptimizer: Equation(  # Goyal et al. 2017, equation 10 without momentum correction
        lambda at: vbs.rules.Scaling(gradient=at.k, weight_decay=at.k, progress=at.k),
        inners=(torch.optim.SGD,),
        any_inner=False,
    ),
    vbs.SqrtSDERuleOptimizer: Equation(  # Malladi et al. 2022, section 5
        lambda at: vbs.rules.Scaling(lr=at.k**0.5, one_minus_beta=at.k, eps=at.k**-0.5, progress=at.k),
        inners=(torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop),
        any_inner=False,
    ),
    vbs.RootHalfLifeRuleOptimizer: Equation(  # Marek et al. 2025, equation 2
        lambda at: vbs.rules.Scaling(lr=at.k**0.5, beta2_power=at.k, progress=at.k),
        inners=(torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop),
        any_inner=False,
    ),
    vbs.InvariantAdamRuleOptimizer: Equation(  # Wang and Aitchison 2024; below the reference, Malladi et al. 2022
        lambda at: vbs.rules.Scaling(
            lr=at.k if at.k > 1 else at.k**0.5,
            eps=1 if at.k > 1 else at.k**-0.5,
            beta1_power=at.k,
            beta2_power=at.k,
            progress=at.k,
        ),
        inners=(torch.optim.Adam, torch.optim.AdamW),
        any_inner=False,
        squares=True,
    ),
    vbs.LEGWRuleOptimizer: Equation(  # You et al. 2019: a batch k times as large warms up for k times the epochs
        lambda at: vbs.rules.Scaling(
            lr=at.k**0.5 * min(1, (at.u * at.k / at.epoch) / (at.k * WARMUP)),  # epochs so far / epochs of warm-up
            progress=at.k,
        ),
        options={"warmup_epochs": WARMUP},
    ),
    vbs.AdaScaleOptimizer: Equation(  # Johnson et al. 2020, section 3
        lambda at: vbs.rules.Scaling(lr=at.gain, progress=at.gain), inners=(torch.optim.SGD,), noise=True
    ),
    vbs.AdamScaleOptimizer: Equation(  # Qiao et al. 2021, section 3.2
        lambda at: vbs.rules.Scaling(lr=at.gain**0.5, progress=at.gain),
        inners=(torch.optim.Adam, torch.optim.AdamW),
        noise=True,
    ),
    vbs.SurgeRuleOptimizer: Equation(  # Li et al. 2024, equation 13
        lambda at: vbs.rules.Scaling(lr=surge(at), progress=at.gain),
        inners=(torch.optim.Adam, torch.optim.AdamW),
        noise=True,
    ),
}


def _own_equation(name: str) -> Equation:
    """The factors that the rule's own class returns."""
    rule = vbs.rules.RULES[name]()

    def factors(at: Variables) -> vbs.rules.Scaling:
        update = round(at.k * at.ref), round(at.ref), round(at.u - 1)
        return rule(vbs.rules.RuleInput(*update, noise=vbs.rules.Noise(at.noise * at.ref, 1.0, at.gain)))

    return Equation(factors, noise=bool(getattr(rule, "needs_noise", False)))


def _class_of(name: str) -> type[vbs.CustomOptimizer]:
    """The named optimizer of a rule; for a rule without one, a class that is created here."""
    for kind in EQUATIONS:
        if kind.rule_name == name:  # type: ignore[attr-defined]
            return kind
    return type(f"{vbs.rules.RULES[name].__name__}Optimizer", (NamedOptimizer,), {"rule_name": name})


OPTIMIZERS = {name: _class_of(name) for name in vbs.rules.RULES}
EQUATIONS |= {kind: _own_equation(name) for name, kind in OPTIMIZERS.items() if kind not in EQUATIONS}
LINEAR = EQUATIONS[vbs.LinearRuleOptimizer]


# --------------------------------------------------------------------------------------------------------- the twin


def batches(sizes: Sequence[int], dataset_size: int, seed: int = 0) -> Iterator[NDArray[np.int64]]:
    """The samples of each update, (samples,) each: epochs follow one another along `sizes`, to its end."""
    step = epoch = 0
    while step < len(sizes):
        samples = order(dataset_size, seed, epoch)(np.arange(dataset_size))
        used = 0
        while used < dataset_size and step < len(sizes):
            yield samples[used : used + sizes[step]]  # the last one of an epoch is shortened
            used += sizes[step]
            step += 1
        epoch += 1


def gradient(weights: Sequence[Array], x: Array, target: Array) -> list[Array]:
    """The gradient of the mean over one big batch of |f(x) - target|^2, where f(x) = W tanh(V x + a) + b."""
    v, a, w, b = weights
    hidden = np.tanh(x @ v.T + a)
    error = 2 * (hidden @ w.T + b - target) / len(x)
    back = (error @ w) * (1 - hidden**2)
    return [back.T @ x, back.sum(axis=0), error.T @ hidden, error.sum(axis=0)]


# ------------------------------------------------------------------------------------- the training with the package

SIZES = (20, 7, 1, 33, 12, 50, 3)


@dataclass
class Training:
    """The objects of a user's script."""

    model: nn.Module
    sampler: vbs.CustomSampler
    optimizer: vbs.CustomOptimizer
    x: Tensor
    target: Tensor

    def loss(self, indices: Sequence[int]) -> Tensor:
        rows = (self.model(self.x[indices]) - self.target[indices]).square().sum(dim=1)
        return rows.mean() if self.optimizer.reduction == "mean" else rows.sum()

    def step(self, indices: Sequence[int]) -> bool:
        """Train on a microbatch; return the result of `optimizer.step()`."""
        loss = self.loss(indices)
        if isinstance(getattr(self.model, "_orig_mod", self.model), (FSDPModule, DistributedDataParallel)):
            self.optimizer.backward(loss)
        else:
            loss.backward()
        return self.optimizer.step()

    def steps(self) -> Iterator[bool]:
        """Train for the rest of the epoch; yield the result of `step` for each microbatch."""
        return map(self.step, self.sampler)

    def microbatches(self, until: int) -> Iterator[list[int]]:
        """Those up to this update, over any number of epochs, for a loop that makes a step of each."""
        while self.optimizer.updates < until:
            for indices in self.sampler:
                yield indices
                if self.optimizer.updates == until:
                    return

    def run(self, updates: int) -> Training:
        """Train for a number of updates, over any number of epochs."""
        while updates:
            epoch = self.optimizer.epoch
            self.sampler.set_epoch(epoch)
            self.optimizer.set_epoch(epoch)
            for updated in self.steps():
                updates -= updated
                if updates == 0:
                    break
        return self

    def iterate(self, until: int) -> Training:
        """Train until this update, within one iteration over the sampler."""
        for _ in self.steps():
            if self.optimizer.updates == until:
                break
        return self

    def weights(self) -> list[Array]:
        """Copies of the weights, whole; of a sharded model all ranks have to call it."""
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in self.model.parameters()]
        real = (torch.view_as_real(one) if one.is_complex() else one for one in whole)
        return [parameter.detach().cpu().double().numpy().copy() for parameter in real]


def data(number: int) -> tuple[Tensor, Tensor]:
    """Float64 samples: x, (number, 3), and target, (number, 2)."""
    rng = np.random.default_rng(7)
    return torch.from_numpy(rng.normal(size=(number, 3))), torch.from_numpy(rng.normal(size=(number, 2)))


def filled(model: nn.Module) -> nn.Module:
    """The model with fixed weights; torch's generator is shared by ranks that are threads, so it is not used."""
    rng = np.random.default_rng(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(size=parameter.shape) / 2))
    return model


def network(dtype: torch.dtype = torch.float64, width: int = 4) -> nn.Module:
    """f(x) = W tanh(V x + a) + b."""
    return filled(nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).double()).to(dtype)


def wrap(
    kind: type[vbs.CustomOptimizer], inner: torch.optim.Optimizer, sampler: vbs.CustomSampler, **options: Any
) -> vbs.CustomOptimizer:
    """Create an optimizer of any wrapper class, with REF as its reference."""
    return kind(inner, sampler, **({"ref_batchsize": REF} | EQUATIONS.get(kind, LINEAR).options | options))


def training(
    kind: type[vbs.CustomOptimizer] = vbs.LinearRuleOptimizer,
    sizes: Sequence[int] | vbs.AdaptiveTrace = SIZES,
    *,
    dataset_size: int = 50,
    minibatch_size: int = 4,
    backend: vbs.backend.Backend | None = None,
    dtype: torch.dtype = torch.float64,
    model: nn.Module | None = None,
    inner: Callable[..., torch.optim.Optimizer] | None = None,
    hyperparameters: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
    world: World | None = None,
    **options: Any,
) -> Training:
    """A training whose trace holds its last size; `options` are the optimizer's, `sampling` the sampler's.

    With a `world`, for which the sampler deals, the optimizer finds its backend by itself.

    `inner` is by default what the class goes around, with the hyperparameters that its twin has.
    """
    usual = EQUATIONS.get(kind, LINEAR).inners[0]
    inner = inner or usual
    hyperparameters = HYPERPARAMETERS.get(inner, HYPERPARAMETERS[usual]) if hyperparameters is None else hyperparameters
    group = options.get("process_group")
    backend = backend or (vbs.backend.LocalBackend() if group is None else vbs.backend.DistributedBackend(group))
    model = model or network(dtype)
    model = model if device is None else model.to(device)
    dealt = {"fixed_shape": False} | ({} if isinstance(sizes, vbs.AdaptiveTrace) else {"on_end": "hold"})
    sampler = vbs.CustomSampler(
        dataset_size,
        sizes if isinstance(sizes, vbs.AdaptiveTrace) else list(sizes),
        (world or backend.world).size,
        (world or backend.world).rank,
        minibatch_size,
        **{**dealt, **(sampling or {})},
    )
    x, target = (tensor.to(device=device, dtype=dtype) for tensor in data(dataset_size))
    known = DistributedDataParallel, FSDPModule, _BatchNorm
    if world is not None or any(isinstance(part, known) for part in model.modules()):
        options = {"model": model} | options
    options |= {} if group is not None or world is not None else {"backend": backend}
    optimizer = wrap(kind, inner(model.parameters(), **hyperparameters), sampler, **options)
    return Training(model, sampler, optimizer, x, target)


def twin(
    kind: type[vbs.CustomOptimizer],
    sizes: Sequence[int],
    *,
    dataset_size: int = 50,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    max_grad_norm: float | None = None,
    skipped: Collection[int] = (),
    factors: Callable[[Variables], vbs.rules.Scaling] | None = None,
    inner: type[torch.optim.Optimizer] | None = None,
    minibatch_size: int = 4,
    fixed_shape: bool = False,
    width: int = 4,
    taken: list[vbs.rules.Scaling] | None = None,
    **hyperparameters: Any,
) -> list[Array]:
    """The weights that `training(kind, sizes, dataset_size)` must end with, after all steps except the `skipped` ones.

    `factors`, `inner` and `hyperparameters` are by default the class's own; `taken` gets the factors of each update.
    """
    taken = [] if taken is None else taken
    x, target = (tensor.to(dtype).double().numpy() for tensor in data(dataset_size))
    factors, inner = factors or EQUATIONS[kind].factors, inner or EQUATIONS[kind].inners[0]
    weights = dict(enumerate(p.detach().double().numpy() for p in network(dtype, width).parameters()))
    optimizer = InnerTwin(inner, weights, [(list(weights), HYPERPARAMETERS[inner] | hyperparameters)])
    squares_at = REF if EQUATIONS[kind].squares else None
    plain = PlainTraining(weights, optimizer.step, max_grad_norm, NoiseTwin(REF), squares_at)

    def mean_gradient(samples: NDArray[np.int64]) -> Gradients:
        return dict(enumerate(gradient(list(weights.values()), x[samples], target[samples])))

    for step, batch in enumerate(batches(sizes, dataset_size, seed)):
        if step not in skipped:
            parts = split_batch(batch, minibatch_size, fixed_shape)
            microbatches = [(len(part), mean_gradient(part)) for part in parts]
            rule = rule_at(factors, len(batch), step + 1, dataset_size)
            taken += plain.update(mean_gradient(batch), microbatches, [rule])
    return list(weights.values())


def factors_along(
    kind: type[vbs.CustomOptimizer], sizes: Sequence[int], *, dataset_size: int = 50
) -> list[vbs.rules.Scaling]:
    """The factors of each update of `training(kind, sizes, dataset_size)`."""
    taken: list[vbs.rules.Scaling] = []
    twin(kind, sizes, dataset_size=dataset_size, taken=taken)
    return taken


def assert_equal(found: Sequence[Array], expected: Sequence[Array], tolerance: float = 1e-12) -> None:
    """Relative to the largest weight."""
    largest = max(float(np.abs(array).max()) for array in expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest)


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found.pop("state"), expected.pop("state"), rtol=0, atol=0)
    assert found == expected
