"""The slow twin of a training: one update at a time, from the laws alone, without a world, a loader or a buffer."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fuzz.case import Case, RuleCase
from fuzz.inner import INNER, Hyperparameters, State
from fuzz.model import Data, Net, seed_masks, tokens

Gradients = dict[str, Tensor]  # name of the parameter -> gradient; those without one are missing


@dataclass(frozen=True)
class Expected:
    """What must be true after an update."""

    weights: dict[str, Tensor]
    microbatches: list[tuple[int, list[int]]]  # distinct samples and rows
    touched: list[frozenset[str]]  # parameters with a gradient, of each microbatch
    updated: bool
    samples: int
    epoch: int  # of the next update
    progress: float
    lr_factor: float


@dataclass(frozen=True)
class Factors:
    """Factors on the reference values."""

    lr: float = 1.0
    gradient: float = 1.0
    weight_decay: float = 1.0
    one_minus_beta: float = 1.0
    eps: float = 1.0
    progress: float = 1.0
    beta2_power: float = 1.0


class NoiseAverages:
    """sigma^2 and mu^2: averaged first, debiased, divided after; no floor in absolute units."""

    def __init__(self, ref: int, early_gain: bool) -> None:
        self.ref, self.early_gain = ref, early_gain
        self.sigma2 = self.mu2 = self.weight = 0.0

    def add(self, groups: Sequence[tuple[int, Tensor]], batch_size: int) -> None:
        """An estimate from at least two groups of (samples, gradient); `batch_size` sets its weight."""
        number, samples = len(groups), sum(n for n, _ in groups)
        whole = torch.stack([n / samples * g for n, g in groups]).sum(0)
        mean_square = sum(n / samples * float(g @ g) for n, g in groups)
        square = float(whole @ whole)
        theta = max(0.0, 1 - batch_size / self.ref / 1000)
        estimates = samples * (mean_square - square) / (number - 1), (number * square - mean_square) / (number - 1)
        self.sigma2 = theta * self.sigma2 + (1 - theta) * estimates[0]
        self.mu2 = theta * self.mu2 + (1 - theta) * estimates[1]
        self.weight = theta * self.weight + (1 - theta)

    def gain(self, batch_size: int) -> float:
        if self.weight == 0:
            return min(1.0, batch_size / self.ref) if self.early_gain else 1.0
        sigma2, mu2 = max(self.sigma2, 0.0) / self.weight, max(self.mu2, 0.0) / self.weight
        return (sigma2 / self.ref + mu2) / (sigma2 / batch_size + mu2)


class Twin:
    """The user's model and its plain training."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = Net(case.parts, torch.Generator().manual_seed(case.seed))
        self.model.to(case.dtype).double()  # the same numbers, rounded
        self.data = Data(case.seed, case.dataset_size, case.poisoned, case.dtype)
        self.data.x, self.data.target = self.data.x.double(), self.data.target.double()
        self.groups = parameter_groups(self.model, len(case.groups))
        self.states: dict[str, State] = {}
        self.noise = NoiseAverages(case.ref_batchsize, "early_gain" not in case.without)
        self.previous: tuple[int, Tensor] | None = None  # samples and gradient of the update before
        self.progress, self.lr_factor, self.samples = 0.0, 1.0, 0

    def train(self) -> list[Expected]:
        return [self.update(number) for number in range(len(self.case.updates))]

    def update(self, number: int) -> Expected:
        case, planned = self.case, self.case.updates[number]
        batch_size = len(planned.samples)
        microbatches = planned.microbatches(
            case.minibatch_size(number), case.fixed_shape, "even_cut" not in case.without, case.ranks(number)
        )
        gradients = self.gradients(number, microbatches)
        touched = frozenset(name for own in gradients for name in own)
        reduced = {name: torch.zeros_like(self.model.get_parameter(name)) for name in touched}
        for (samples, _), own in zip(microbatches, gradients, strict=True):
            for name, gradient in own.items():
                reduced[name] = reduced[name] + samples / batch_size * gradient
        if case.counts:  # the gradients are those of sums over tokens
            total = sum(map(tokens, planned.samples))
            reduced = {name: gradient * batch_size / total for name, gradient in reduced.items() if total}
        finite = all(g.isfinite().all() for own in gradients for g in own.values())
        updated = (finite or not case.measures_noise) and bool(reduced)
        if updated:
            gain = self.measure(microbatches, gradients, batch_size) if case.measures_noise else math.nan
            factors = [
                factors_of(case, self.rule(group), batch_size, number, gain) for group in range(len(self.groups))
            ]
            self.step(number, clipped(reduced, case.max_grad_norm), factors)
            self.progress += factors[0].progress
            self.lr_factor = factors[0].lr * factors[0].gradient
        self.samples += batch_size
        return Expected(
            weights={name: parameter.detach().clone() for name, parameter in self.model.named_parameters()},
            microbatches=microbatches,
            touched=[frozenset(own) for own in gradients],
            updated=updated,
            samples=self.samples,
            epoch=planned.epoch + planned.ends_epoch,
            progress=self.progress,
            lr_factor=self.lr_factor,
        )

    def rule(self, group: int) -> RuleCase:
        return self.case.rules[group if len(self.case.rules) > 1 else 0]

    def gradients(self, number: int, microbatches: Sequence[tuple[int, list[int]]]) -> list[Gradients]:
        """The gradient of the mean loss of each microbatch."""
        result = []
        self.model.update = number
        if self.case.host_dropout:
            seed_masks(self.model, self.case.seed, number, None)
        for _, rows in microbatches:
            if not self.case.host_dropout:
                seed_masks(self.model, self.case.seed, number, rows[0])
            self.model.zero_grad(set_to_none=True)
            loss = self.data.loss(self.model, rows, "mean", of_tokens=self.case.counts)
            (loss * self.case.loss_scale).backward()  # type: ignore[no-untyped-call]
            named = self.model.named_parameters()
            result.append({name: parameter.grad for name, parameter in named if parameter.grad is not None})
        return result

    def measure(
        self, microbatches: Sequence[tuple[int, list[int]]], gradients: Sequence[Gradients], batch_size: int
    ) -> float:
        """The gain of the update; a missing gradient is 0."""
        zeros = {name: torch.zeros_like(parameter) for name, parameter in self.model.named_parameters()}
        vectors = [torch.cat([(zeros | own)[name].reshape(-1) for name in zeros]) for own in gradients]
        groups = [(n, vector) for (n, _), vector in zip(microbatches, vectors, strict=True)]
        now = batch_size, torch.stack([n / batch_size * vector for n, vector in groups]).sum(0)
        if len(groups) == 1 and self.case.noise == "differenced" and self.previous is not None:
            groups = [self.previous, now]
        if len(groups) > 1:
            self.noise.add(groups, batch_size)
        self.previous = now
        return self.noise.gain(batch_size)

    def step(self, number: int, gradients: Gradients, factors: Sequence[Factors]) -> None:
        inner = INNER[self.case.optimizer]
        for names, reference, by in zip(self.groups, self.case.groups, factors, strict=True):
            scaled = self.scaled(dict(reference), by, number)
            for name in names:
                if name in gradients:
                    parameter = self.model.get_parameter(name)
                    state = self.states.setdefault(name, {})
                    parameter.data = inner(parameter.data, by.gradient * gradients[name], state, scaled)

    def scaled(self, values: Hyperparameters, by: Factors, number: int) -> Hyperparameters:
        values["lr"] *= self.case.decay**number * by.lr
        values["weight_decay"] *= by.weight_decay
        if "eps" in values:
            values["eps"] *= by.eps
        if "betas" in values:
            beta1, beta2 = (1 - by.one_minus_beta * (1 - beta) for beta in values["betas"])
            values["betas"] = beta1, beta2**by.beta2_power
        if "alpha" in values:
            values["alpha"] = (1 - by.one_minus_beta * (1 - values["alpha"])) ** by.beta2_power
        return values


def parameter_groups(model: Net, number: int) -> list[list[str]]:
    """The names of the parameters of each group: the first half, and the others."""
    names = [name for name, _ in model.named_parameters()]
    return [names] if number == 1 else [names[: len(names) // 2], names[len(names) // 2 :]]


def factors_of(case: Case, rule: RuleCase, batch_size: int, number: int, gain: float) -> Factors:
    """The equations of the papers."""
    k = batch_size / case.ref_batchsize
    warmup = 1.0 if rule.warmup == 0 else min(1.0, (number + 1) / rule.warmup)
    by = {
        "constant": Factors(),
        "linear": Factors(lr=k, progress=k),
        "root": Factors(lr=k**0.5, progress=k),
        "linear-momentum": Factors(gradient=k, weight_decay=k, progress=k),
        "sqrt-sde": Factors(lr=k**0.5, one_minus_beta=k, eps=k**-0.5, progress=k),
        "root-half-life": Factors(lr=k**0.5, beta2_power=k, progress=k),
        "legw": Factors(lr=k**0.5 * warmup, progress=k),
        "adascale": Factors(lr=gain, progress=gain),
        "adamscale": Factors(lr=gain**0.5, progress=gain),
    }[rule.name]
    if not rule.timescale:
        return by
    return replace(by, weight_decay=k / by.lr)


def clipped(gradients: Gradients, most: float | None) -> Gradients:
    """g min(1, most / |g|); the 1e-6 is torch's."""
    if most is None:
        return gradients
    norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    return {name: g * min(1.0, most / (norm + 1e-6)) for name, g in gradients.items()}


def expected(case: Case, shift: float = 0.0) -> list[Expected]:
    """What must be true after each update of a case, from initial weights that are greater by a relative `shift`."""
    twin = Twin(copy.copy(case))
    for parameter in twin.model.parameters():
        parameter.data *= 1 + shift
    return twin.train()
