"""A small training whose trace a controller may write, in worlds that follow one another."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import variable_batch_size as vbs
from helpers.loops import InThread
from helpers.runs import read_ahead
from variable_batch_size.adaptive import ControlInput
from variable_batch_size.testing import ThreadBackend, run_ranks
from variable_batch_size.world import World

SAMPLES = 120
DATA = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = DATA @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + torch.sin(7 * DATA[:, 0])


@dataclass(frozen=True)
class Wild:
    """A pure controller that reads everything but the world."""

    salt: int
    needs_noise: bool

    def __call__(self, input: ControlInput) -> int:
        size = (input.updates * 37 + input.samples * 11 + int(input.progress * 3) + (input.batch_size or 0) * 5) % 23
        if self.needs_noise:
            assert input.noise is not None
            scale = input.noise.noise_scale
            size += int(min(scale, 1e6)) % 7 if math.isfinite(scale) else 3
        return 1 + (size + self.salt) % 29


@dataclass(frozen=True)
class Setting:
    """A training, but for its worlds."""

    trace: Any
    minibatch_size: int
    fixed_shape: bool
    rule: str
    ahead: int = 0
    loader: str = "plain"
    drop_last: bool = False
    noise: Any = None


Result = tuple[dict[str, Any], torch.Tensor, list[tuple[int, int]]]


def loader(sampler: vbs.CustomSampler, setting: Setting) -> Any:
    if setting.loader == "thread":
        return InThread(sampler, setting.ahead + 1)
    return read_ahead(sampler, setting.ahead)


def part(setting: Setting, world: World, backend: Any, state: Any, updates: int, weights: torch.Tensor) -> Result:
    """Train on one rank from a state to so many updates of the whole training."""
    model = torch.nn.Linear(3, 1, bias=False).double()
    model.weight.data.copy_(weights)
    sampler = vbs.CustomSampler(
        SAMPLES,
        setting.trace,
        world.size,
        world.rank,
        setting.minibatch_size,
        seed=5,
        fixed_shape=setting.fixed_shape,
        drop_last=setting.drop_last,
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.5)
    optimizer = vbs.CustomOptimizer(
        inner, sampler, ref_batchsize=8, rule=setting.rule, noise=setting.noise, backend=backend
    )
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    while optimizer.updates < updates:
        sampler.set_epoch(optimizer.epoch)
        for batch in loader(sampler, setting):
            ((model(DATA[batch])[:, 0] - TARGETS[batch]) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.updates == updates and not optimizer.inside_step:
                break
    runs = [(int(first), int(size)) for first, size in zip(*sampler.trace.runs, strict=True)]
    return optimizer.state_dict(), model.weight.detach().clone(), runs


def trained(setting: Setting, parts: Sequence[tuple[int, int]]) -> Result:
    """Train in parts, (world size, number of updates at its end), each of which resumes from the one before."""
    state, weights = None, torch.zeros(1, 3, dtype=torch.float64)
    runs: list[tuple[int, int]] = []
    for size, updates in parts:

        def rank(backend: ThreadBackend, state: Any = state, weights: Any = weights, updates: int = updates) -> Result:
            return part(setting, backend.world, backend, state, updates, weights)

        results = run_ranks(rank, size)
        state, weights, runs = results[0]
        assert all(torch.equal(other[1], weights) for other in results)
        assert all(other[2] == runs for other in results)
        assert all(repr(other[0]["vbs"]) == repr(state["vbs"]) for other in results)  # nan is not equal
    return state, weights, runs  # type: ignore[return-value]
