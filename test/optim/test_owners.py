"""Parameters that the inner optimizer trains although they are in none of its groups: the first update shows them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.processes import run_job
from variable_batch_size.testing import run_ranks


class Pair(torch.optim.Optimizer):
    """As a Muon that steps the rest of the parameters by an AdamW within."""

    def __init__(self, matrices, rest, inner, *, data=False):
        super().__init__(matrices, {"lr": 0.01})
        self.rest, self.inner, self.data = list(rest), inner, data

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
        if self.data:  # which no version counts
            for parameter in self.rest:
                parameter.data.sub_(0.01 * parameter.grad)
        elif self.inner is not None:
            self.inner.step()


class WarmedUp(torch.optim.SGD):
    """Its first step has the rate 0."""

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["lr"] = 0.01


INNERS = {
    "AdamW": lambda rest: torch.optim.AdamW(rest, lr=0.01),
    "AdamW, for loops": lambda rest: torch.optim.AdamW(rest, lr=0.01, foreach=False),
    "AdamW, fused": lambda rest: torch.optim.AdamW(rest, lr=0.01, fused=True),
    "SGD, warmed up": lambda rest: WarmedUp(rest, lr=0.0),
    "data": lambda rest: None,
}


def train(backend, how, *, known=True, ddp=False, own=True, updates=2):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    module = DistributedDataParallel(model) if ddp else model
    rest = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    inner = Pair(
        [p for p in model.parameters() if p.ndim == 2],
        rest,
        INNERS[how](rest) if own else None,
        data=how == "data" and own,
    )
    world = backend.world
    sampler = vbs.CustomSampler(24, 8, world.size, world.rank, minibatch_size=2, shuffle=False)
    options = {"model": module} if known or ddp else {}
    optimizer = vbs.ConstantOptimizer(inner, sampler, backend=backend, **options)
    others = None if own else INNERS[how](rest) or torch.optim.SGD(rest, lr=0.01)
    for rows in sampler:
        optimizer.backward(module(torch.ones(len(rows), 3)).square().mean())
        if optimizer.step():
            if others is not None:
                others.step()
            if optimizer.updates == updates:
                return [parameter.tolist() for parameter in model.parameters()]
    raise AssertionError


FOUND = r"Pair.step\(\) has changed parameter (0.bias|of shape \(\d,\)), but it is in none .* first update was made"


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("known", [True, False], ids=["model", "graph"])
@pytest.mark.parametrize("how", INNERS)
def test_what_the_inner_optimizer_trains_without_a_group_raises(how, known, ranks):
    with pytest.raises(RuntimeError, match=FOUND):
        run_ranks(lambda backend: train(backend, how, known=known), ranks)


def train_by_ddp(backend, own):
    try:
        return train(backend, "AdamW", ddp=True, own=own)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("own", [True, False])
def test_it_is_found_in_ddp(own):
    found = run_job("gloo", train_by_ddp, own, ranks=2)
    assert all(isinstance(one, str) and "Pair.step() has changed parameter 0.bias" in one for one in found) == own
    assert own or found[0] == found[1]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("how", INNERS)
def test_parameters_that_another_optimizer_trains_are_its_own(how, known):
    train(vbs.backend.LocalBackend(), how, known=known, own=False)


def test_a_head_that_is_trained_alone_and_a_frozen_model_stay_allowed():
    body, head = nn.Linear(3, 4), nn.Linear(4, 1)
    model = nn.Sequential(body, head)
    sampler = vbs.CustomSampler(8, 4, 1, 0, minibatch_size=2)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(head.parameters(), lr=0.1), sampler, model=model)
    before = body.weight.clone()
    for rows in sampler:
        optimizer.backward(model(torch.ones(len(rows), 3)).mean())
        optimizer.step()
    assert optimizer.updates == 2
    assert body.weight.equal(before)


def test_nothing_is_kept_after_the_first_update():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    sampler = vbs.CustomSampler(8, 2, 1, 0, minibatch_size=2)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), sampler, model=model)
    for rows in sampler:
        optimizer.backward(model(torch.ones(len(rows), 3)).mean())
        optimizer.step()
        model.zero_grad()
    with torch.no_grad():
        versions = [parameter._version for parameter in model[0].parameters()]
    assert versions == [parameter._version for parameter in model[0].parameters()]
    assert optimizer._abilities.owners._named is None


@pytest.mark.parametrize("kind", ["clamped", "nan"])
def test_what_a_step_writes_and_leaves_as_it_was_is_not_trained(kind):
    body, head = nn.Linear(3, 4), nn.Linear(4, 1)
    model = nn.Sequential(body, head)
    if kind == "nan":
        with torch.no_grad():
            body.bias[0] = torch.nan
    sampler = vbs.CustomSampler(12, 2, 1, 0, minibatch_size=2)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(head.parameters(), lr=0.1), sampler, model=model)

    @torch.no_grad()
    def clamp(*_):
        for parameter in model.parameters():
            parameter.clamp_(-100, 100)

    optimizer.register_step_post_hook(clamp)
    for rows in sampler:
        optimizer.backward(model(torch.ones(len(rows), 3)).mean())
        optimizer.step()
    assert optimizer.updates == 6
    assert optimizer._abilities.owners._named is None  # it has looked for long enough
