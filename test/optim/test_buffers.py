"""Buffers that forward writes: the second microbatch shows them, by their content and not by the class of a layer."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.processes import run_job
from variable_batch_size.testing import run_ranks


class Layer(nn.Module):
    """Has a buffer, and does with it what its kind does."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.known = kind, False
        self.register_buffer("kept", torch.ones(3))

    def forward(self, x):
        if self.training:
            KINDS[self.kind](self, x.detach())
        return x * self.kept.detach().clone()


def fill_once(layer, x):
    if not layer.known:
        layer.kept, layer.known = torch.full((3,), 2.0), True


def grow(layer, x):
    layer.kept = torch.ones(len(x), 3)


def replace(layer, x):
    layer.kept = layer.kept + x.mean(0)


def count_update(layer, *_):
    layer.kept = layer.kept + 1


WRITES = {
    "codebook": lambda layer, x: layer.kept.lerp_(x.mean(0), 0.1),
    "maximum": lambda layer, x: layer.kept.copy_(torch.maximum(layer.kept, 1 + x.amax(0).cumsum(0) + layer.kept)),
    "load": lambda layer, x: layer.kept.add_(len(x)),
    "assigned": replace,
}
LEAVES = {
    "nothing": lambda layer, x: None,
    "cache": fill_once,
    "the same values": lambda layer, x: layer.kept.copy_(layer.kept.clone()),
    "a cache that grows": grow,
}
KINDS = WRITES | LEAVES


def train(backend, kind, *, reproducible=False, ddp=False, wrong=None, known=True, size=8):
    model = nn.Sequential(Layer(kind), nn.BatchNorm1d(3) if wrong == "norm" else nn.Identity(), nn.Linear(3, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    module = DistributedDataParallel(model, broadcast_buffers=False) if ddp else model
    world = backend.world
    sampler = vbs.CustomSampler(24, size, world.size, world.rank, 2, shuffle=False, reproducible=reproducible)
    options = {"model": module} if known else {}
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, backend=backend, **options)
    if wrong == "hook":  # the way: once an update
        optimizer.register_step_pre_hook(partial(count_update, model[0]))
    rows = torch.arange(72.0).view(24, 3) / 72
    loader = torch.utils.data.DataLoader(rows, batch_sampler=sampler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for update in vbs.updates(loader, optimizer):
            if wrong == "evaluation":  # with a graph
                model.eval()(rows)
                model.train()
            if wrong == "probe":
                with optimizer.outside():
                    module(rows).sum().backward()
                count_update(model[0])
            for rows in update:
                optimizer.backward(module(rows).square().mean())
                optimizer.step()
    return optimizer.updates, [str(one.message) for one in caught if "Forward writes" in str(one.message)]


ranks = pytest.mark.parametrize("ranks", [1, 2, 3])


@ranks
@pytest.mark.parametrize("kind", WRITES)
def test_a_buffer_that_forward_writes_is_named_once(kind, ranks):
    found = run_ranks(lambda backend: train(backend, kind), ranks)
    assert {updates for updates, _ in found} == {3}
    assert sum(len(said) for _, said in found) <= 1  # threads share what catches warnings
    _, said = train(vbs.backend.LocalBackend(), kind)
    assert len(said) == 1
    assert said[0].startswith(
        "Forward writes buffer 'kept' of Layer: each microbatch changes it, on each rank by itself"
    )


@ranks
@pytest.mark.parametrize("kind", WRITES)
def test_it_is_refused_where_updates_must_be_reproducible(kind, ranks):
    with pytest.raises(
        ValueError, match=r"buffers that forward leaves alone, got writes to 'kept' of Layer; .* in a hook"
    ):
        run_ranks(lambda backend: train(backend, kind, reproducible=True), ranks)


@ranks
@pytest.mark.parametrize("kind", LEAVES)
def test_caches_and_hooks_are_silent(kind, ranks):
    for options in ({}, {"reproducible": True}, {"wrong": "hook"} if kind == "nothing" else {}):
        assert run_ranks(lambda backend: train(backend, kind, **options), ranks) == [(3, [])] * ranks  # noqa: B023


def test_batch_normalization_has_rules_of_its_own():
    assert train(vbs.backend.LocalBackend(), "nothing", wrong="norm") == (3, [])


def test_one_microbatch_an_update_is_enough():
    _, said = train(vbs.backend.LocalBackend(), "codebook", size=2)
    assert len(said) == 1


@pytest.mark.parametrize("between", ["evaluation", "probe"])
def test_a_forward_between_two_updates_is_none_of_the_training(between):
    _, said = train(vbs.backend.LocalBackend(), "codebook", size=2, wrong=between)
    assert len(said) == 1
    assert train(vbs.backend.LocalBackend(), "nothing", size=2, wrong=between, reproducible=True) == (12, [])


def test_without_a_model_nothing_is_known():
    assert train(vbs.backend.LocalBackend(), "codebook", known=False) == (3, [])


def by_ddp(backend, kind):
    return train(backend, kind, ddp=True)


@pytest.mark.parametrize("kind", ["codebook", "cache"])
def test_it_is_seen_in_ddp(kind):
    (_, said), (_, of_other) = run_job("gloo", by_ddp, kind, ranks=2)
    assert (len(said), len(of_other)) == (kind in WRITES, 0)
