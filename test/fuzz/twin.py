"""The slow twin of a training: one update at a time, from the laws alone, without a world, a loader or a buffer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import variable_batch_size as vbs
from fuzz.case import SQUARES_RULE, Case, RuleCase
from fuzz.model import Data, Net, seed_masks, tokens
from helpers.reference import EQUATIONS, OPTIMIZERS, WARMUP, rule_at
from helpers.twins import Gradients, InnerTwin, NoiseTwin, PlainTraining, Rule


@dataclass(frozen=True)
class Expected:
    """What must be true after an update."""

    weights: dict[str, Tensor]
    microbatches: list[tuple[int, list[int]]]  # distinct samples and rows
    updated: bool
    samples: int
    epoch: int  # of the next update
    progress: float
    lr_factor: float
    averages: dict[str, Tensor]  # of the weights; empty without a WeightAverage


class Twin:
    """The user's model and its plain training."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = Net(case.parts, torch.Generator().manual_seed(case.seed))
        self.model.to(case.dtype).double()  # the same numbers, rounded
        self.data = Data(case.seed, case.dataset_size, case.poisoned, case.dtype)
        self.data.x, self.data.target = self.data.x.double(), self.data.target.double()
        weights = {name: parameter.detach().numpy() for name, parameter in self.model.named_parameters()}
        self.groups = [dict(group) for group in case.groups]
        names = parameter_groups(self.model, len(self.groups))
        inner = InnerTwin(getattr(torch.optim, case.optimizer), weights, list(zip(names, self.groups, strict=True)))
        noise = NoiseTwin(case.ref_batchsize, case.noise == "differenced")
        self.plain = PlainTraining(weights, inner.step, case.max_grad_norm, noise if case.measures_noise else None)
        if case.measures_squares:
            own = zip(names, self.rules, strict=True)
            self.plain.squares_at = case.ref_batchsize
            self.plain.squares_of = [name for group, rule in own if rule.name == SQUARES_RULE for name in group]
        self.progress, self.lr_factor, self.samples = 0.0, 1.0, 0
        self.averages = self.weights() if case.average else {}

    def train(self) -> list[Expected]:
        return [self.update(number) for number in range(len(self.case.updates))]

    def update(self, number: int) -> Expected:
        case, planned = self.case, self.case.updates[number]
        batch_size = len(planned.samples)
        microbatches = planned.microbatches(case.minibatch_size(number), case.fixed_shape, case.ranks(number))
        gradients = self.gradients(number, microbatches)
        reduced: dict[str, Any] = {}
        for samples, own in gradients:
            for name, gradient in own.items():
                reduced[name] = reduced.get(name, 0.0) + samples / batch_size * gradient
        if case.counts:  # the gradients are those of sums over tokens
            total = sum(map(tokens, planned.samples))
            reduced = {name: gradient * batch_size / total for name, gradient in reduced.items() if total}
        finite = all(np.isfinite(g).all() for _, own in gradients for g in own.values())
        updated = (finite or not case.measures_noise) and bool(reduced)
        if updated:
            rules = [equation_of(case, rule, batch_size, number) for rule in self.rules]
            factors = self.plain.update(reduced, gradients, rules)
            self.progress += factors[0].progress
            self.lr_factor = factors[0].lr * factors[0].gradient
            self.average(factors[0].progress, batch_size)
        for group in self.groups:
            group["lr"] *= case.decay
        self.samples += batch_size
        return Expected(
            weights=self.weights(),
            microbatches=microbatches,
            updated=updated,
            samples=self.samples,
            epoch=planned.epoch + planned.ends_epoch,
            progress=self.progress,
            lr_factor=self.lr_factor,
            averages=dict(self.averages),
        )

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def average(self, progress: float, batch_size: int) -> None:
        """a = decay^p a + (1 - decay^p) w."""
        if (how := self.case.average) is None:
            return
        old = how.decay ** (progress if how.by == "progress" else batch_size / self.case.ref_batchsize)
        self.averages = {name: old * self.averages[name] + (1 - old) * w for name, w in self.weights().items()}

    @property
    def rules(self) -> Sequence[RuleCase]:
        """That of each parameter group."""
        return self.case.rules if len(self.case.rules) > 1 else self.case.rules * len(self.groups)

    def gradients(self, number: int, microbatches: Sequence[tuple[int, list[int]]]) -> list[tuple[int, Gradients]]:
        """The samples of each microbatch, and the gradient of its mean loss."""
        result = []
        self.model.update = number
        if self.case.host_dropout:
            seed_masks(self.model, self.case.seed, number, None)
        for samples, rows in microbatches:
            if not self.case.host_dropout:
                seed_masks(self.model, self.case.seed, number, rows[0])
            self.model.zero_grad(set_to_none=True)
            loss = self.data.loss(self.model, rows, "mean", of_tokens=self.case.counts)
            (loss * self.case.loss_scale).backward()  # type: ignore[no-untyped-call]
            named = self.model.named_parameters()
            own = {name: parameter.grad.numpy() for name, parameter in named if parameter.grad is not None}
            result.append((samples, own))
        return result


def parameter_groups(model: Net, number: int) -> list[list[str]]:
    """The names of the parameters of each group: the first half, and the others."""
    names = [name for name, _ in model.named_parameters()]
    return [names] if number == 1 else [names[: len(names) // 2], names[len(names) // 2 :]]


def equation_of(case: Case, rule: RuleCase, batch_size: int, number: int) -> Rule:
    """The equation of a rule at an update."""
    epoch = max(rule.warmup, 1e-9) * case.ref_batchsize / WARMUP  # in samples: LEGW warms up for WARMUP epochs
    plain = rule_at(EQUATIONS[OPTIMIZERS[rule.name]].factors, batch_size, number + 1, epoch, case.ref_batchsize)
    if not rule.timescale:
        return plain

    def timescaled(*noise: float) -> vbs.rules.Scaling:
        by = plain(*noise)
        return replace(by, weight_decay=batch_size / case.ref_batchsize / by.lr)

    return timescaled


def expected(case: Case, shift: float = 0.0) -> list[Expected]:
    """What must be true after each update of a case, from initial weights that are greater by a relative `shift`."""
    twin = Twin(copy.copy(case))
    for parameter in twin.model.parameters():
        parameter.data *= 1 + shift
    twin.averages = twin.weights() if case.average else {}
    return twin.train()
