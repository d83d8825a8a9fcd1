"""The objects of a user's script, as a case and a segment describe them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import variable_batch_size as vbs
from fuzz.case import Case, RuleCase, Segment
from fuzz.model import Net
from fuzz.twin import parameter_groups
from helpers.runs import read_ahead
from variable_batch_size.backend import Backend
from variable_batch_size.world import World

State = dict[str, Any]


class PlantedError(Exception):
    """Raised inside `step()` on purpose."""


@dataclass
class FailingRule:
    """A rule that raises once, when `armed`."""

    rule: Any
    armed: bool = False

    def __repr__(self) -> str:
        return repr(self.rule)  # a state tells its rule

    @property
    def needs_noise(self) -> bool:
        return bool(getattr(self.rule, "needs_noise", False))

    @property
    def needs_squares(self) -> bool:
        return bool(getattr(self.rule, "needs_squares", False))

    @property
    def scales_betas(self) -> bool:
        return bool(getattr(self.rule, "scales_betas", False))

    def __call__(self, update: vbs.rules.RuleInput) -> vbs.rules.Scaling:
        if self.armed:
            self.armed = False
            raise PlantedError("rule")
        scaling: vbs.rules.Scaling = self.rule(update)
        return scaling


class ReadAhead:
    """A loader that reads a few microbatches ahead, as one with workers does."""

    def __init__(self, sampler: vbs.CustomSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return read_ahead(self.sampler, 4)


def create_inner(case: Case, model: Net) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in names], **hyperparameters}
        for names, hyperparameters in zip(parameter_groups(model, len(case.groups)), case.groups, strict=True)
    ]
    inner: torch.optim.Optimizer = getattr(torch.optim, case.optimizer)(groups, lr=0.5)
    return inner


def create_sampler(case: Case, segment: Segment, world: World) -> vbs.CustomSampler:
    return vbs.CustomSampler(
        case.dataset_size,
        case.trace.argument(),
        world.size,
        world.rank,
        segment.minibatch_size,
        case.sampler_seed,
        shuffle=case.shuffle,
        drop_last=case.drop_last,
        on_end=case.trace.on_end if case.trace.kind == "list" and case.trace.asked is None else None,  # type: ignore[arg-type]
        fixed_shape=segment.fixed_shape,
        epochs=case.epochs,
        max_updates=case.max_updates,
        max_samples=case.max_samples,
    )


def create_optimizer(
    case: Case,
    model: torch.nn.Module,
    inner: torch.optim.Optimizer,
    sampler: vbs.CustomSampler,
    rules: list[Any],
    backend: Backend,
) -> vbs.CustomOptimizer:
    options: dict[str, Any] = {"find_unused_parameters": True} if case.find_unused else {}
    return vbs.CustomOptimizer(
        inner,
        sampler,
        case.ref_batchsize,
        model=model,
        rule=rules if len(rules) > 1 else rules[0],
        noise=case.noise,  # type: ignore[arg-type]
        reduction=case.reduction,  # type: ignore[arg-type]
        max_grad_norm=case.max_grad_norm,
        backend=backend,
        **options,
    )


def create_average(case: Case, model: Net, optimizer: vbs.CustomOptimizer) -> vbs.WeightAverage | None:
    if (how := case.average) is None:
        return None
    return vbs.WeightAverage(model.parameters(), how.decay, optimizer, by=how.by)  # type: ignore[arg-type]


def create_rule(rule: RuleCase, faulty: bool) -> Any:
    """A rule or its name; a faulty one can be armed to raise."""
    if rule.by_name and not faulty:
        return rule.name
    created: Any = vbs.rules.RULES[rule.name](**({"warmup_updates": rule.warmup} if rule.name == "legw" else {}))
    created = vbs.rules.ConstantTimescale(created) if rule.timescale else created
    return FailingRule(created) if faulty else created


def create_loader(kind: str, sampler: vbs.CustomSampler) -> Any:
    dataset: Any = range(sampler.plan.dataset_size)
    if kind == "sampler":
        return sampler
    if kind == "ahead":
        return ReadAhead(sampler)
    if kind == "stateful":
        return StatefulDataLoader(dataset, batch_sampler=sampler)
    return DataLoader(dataset, batch_sampler=sampler, num_workers=int(kind == "workers"))


def loaders_of(states: Iterable[State], before: Segment, after: Segment, case: Case) -> list[Any] | None:
    """The states of the loaders, if the next segment can restore them: in the middle of an epoch, the same split."""
    same = (before.loader, before.world, before.minibatch_size) == (after.loader, after.world, after.minibatch_size)
    inside = 0 < before.end < len(case.updates) and not case.updates[before.end - 1].ends_epoch
    if before.loader != "stateful" or not same or not inside or before.fixed_shape != after.fixed_shape:
        return None
    return [state["loaders"] for state in states]
