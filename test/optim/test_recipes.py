"""Recipes of the page on losses: they make the updates of whole batches in any world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.pages import DOCS, blocks
from variable_batch_size.testing import run_ranks

TRACE = "0:24 2:7 3:50 4:1 5:31"
DATA = TensorDataset(
    torch.randn(90, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(90) % 3
)
OTHERS = torch.randn(70, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def recipe(name: str) -> dict[str, Any]:
    """What the block of the page that has this name defines."""
    (block,) = [block for block in blocks(DOCS / "losses.md", "python") if f"class {name}" in block]
    defined: dict[str, Any] = {"torch": torch, "vbs": vbs}
    exec(block, defined)
    return defined


def filled(model: nn.Module) -> nn.Module:
    model.double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.cos(number + torch.arange(float(parameter.numel()))).view_as(parameter))
    return model


def train(name, backend, rows, **sampling):
    """Train by a recipe over two epochs; return the weights and the buffers."""
    defined, world = recipe(name), backend.world
    dataset = defined["WithUnlabeled"](DATA, OTHERS) if name == "WithUnlabeled" else DATA
    model = filled(defined["Experts"]() if name == "Experts" else nn.Linear(20, 3))
    options = {"epochs": 2, "fixed_shape": False, **sampling}
    sampler = vbs.CustomSampler(dataset, TRACE, world.size, world.rank, rows, **options)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, 16, backend=backend, model=model)
    loader = DataLoader(dataset, batch_sampler=sampler)
    if name == "Experts":
        for _ in vbs.remaining_epochs(sampler, optimizer):
            defined["train_experts"](model, optimizer, loader)
    else:
        defined["train_with_unlabeled"](model, optimizer, loader)
    assert optimizer.updates > 6
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["Experts", "WithUnlabeled"])
def test_a_recipe_makes_the_updates_of_whole_batches(name, ranks):
    expected = train(name, vbs.backend.LocalBackend(), 64)
    for found in run_ranks(lambda backend: train(name, backend, 8), ranks):
        for key, value in expected.items():
            torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(value), rtol=1e-12, atol=1e-12)
    if name == "Experts":
        assert max(map(abs, expected["bias"])) > 0.01


@pytest.mark.parametrize("name", ["Experts", "WithUnlabeled"])
def test_a_recipe_is_reproducible(name):
    first, *others = [
        run_ranks(lambda backend: train(name, backend, 8, reproducible=True), ranks)[0] for ranks in (1, 2, 3)
    ]
    assert others == [first] * 2
