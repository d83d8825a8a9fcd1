"""Goodput in a training that measures noise and throughput itself. The clock is a model: no test depends on time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.controllers import EXAMPLES, FUNCTIONS
from variable_batch_size.adaptive import ControlInput, Goodput, Throughput
from variable_batch_size.adaptive.base import needs_throughput
from variable_batch_size.adaptive.stopwatch import UpdateStopwatch
from variable_batch_size.optim.beside import controller
from variable_batch_size.rules import adascale_gain

BOUNDS, MICROBATCH = (16, 512), 128


class Clock:
    """Seconds that pass only when `sleep` is called."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@dataclass
class Noted:
    """Goodput, and what it was asked and answered."""

    answers: list[tuple[ControlInput, int]] = field(default_factory=list)
    needs_noise: ClassVar[bool] = Goodput.needs_noise
    needs_throughput: ClassVar[bool] = Goodput.needs_throughput

    def __call__(self, input):
        self.answers.append((input, Goodput(BOUNDS)(input)))
        return self.answers[-1][1]


def train(model, start, seed, monkeypatch, *, fixed_shape=False):
    """Train in one process, whose updates take the seconds of a model; return the answers and the batch sizes."""
    clock, noted = Clock(), Noted()
    monkeypatch.setattr(controller, "UpdateStopwatch", partial(UpdateStopwatch, clock))
    torch.manual_seed(seed)
    inputs = torch.randn(4096, 10, dtype=torch.float64)
    targets = inputs.sum(1, keepdim=True) + 2 * torch.randn(4096, 1, dtype=torch.float64)
    dataset, line = TensorDataset(inputs, targets), torch.nn.Linear(10, 1).double()
    trace = vbs.AdaptiveTrace(noted, start=start, bounds=BOUNDS, every=10, delay=6)
    options = {"minibatch_size": MICROBATCH, "seed": seed, "max_updates": 300, "fixed_shape": fixed_shape}
    sampler = vbs.CustomSampler(dataset, trace, num_replicas=1, rank=0, **options)
    optimizer = vbs.AdaScaleOptimizer(torch.optim.SGD(line.parameters(), lr=0.02), sampler, 16, noise="differenced")
    loader = DataLoader(dataset, batch_sampler=sampler)
    while not optimizer.done:
        for x, y in loader:
            mse_loss(line(x), y).backward()
            clock.sleep(model.seconds(len(x), devices=1))
            optimizer.step()
        sampler.set_epoch(sampler.epoch)
        optimizer.set_epoch(sampler.epoch)
    return noted.answers, sampler.trace


def goodput(size, input, model, *, fixed_shape=False):
    """Return the progress a second, up to a factor, if updates take the seconds of a model."""
    assert input.noise is not None
    sigma2, mu2 = max(input.noise.sigma2, 0.0), max(input.noise.mu2, 0.0)
    return adascale_gain(sigma2, mu2, size, 1) / model.seconds(size, 1, MICROBATCH, fixed_shape=fixed_shape)


@pytest.mark.parametrize(("base", "start", "seed"), [(0.001, 16, 0), (0.1, 100, 1), (10.0, 512, 0), (0.1, 512, 1)])
def test_it_explores_until_it_has_measured_and_then_decides(base, start, seed, monkeypatch):
    model = Throughput(accum_base=base, accum_row=0.002)
    answers, trace = train(model, start, seed, monkeypatch)
    explored = [size for input, size in answers if input.throughput is None]
    decided = answers[len(explored) :]
    assert explored == [start, 256 if start == 512 else 2 * start]  # the noise comes first
    assert len(decided) == 28
    assert all(input.throughput is not None for input, _ in decided)
    assert trace.batch_size(0) == start
    assert [trace.batch_size(10 * number + 15) for number in range(29)] == [size for _, size in answers[:29]]
    for input, size in decided[5:]:  # after it has measured what it was wrong about
        best = max(goodput(other, input, model) for other in range(*BOUNDS))
        assert goodput(size, input, model) > best / 1.06


@pytest.mark.parametrize("start", [16, 300])
def test_it_knows_what_microbatches_of_a_fixed_shape_cost(start, monkeypatch):
    """A batch below the microbatch takes as long as a whole one, and 127 samples seven times as long as 128."""
    model = Throughput(accum_base=0.01, accum_row=0.002)
    answers, _ = train(model, start, 0, monkeypatch, fixed_shape=True)
    decided = [(input, size) for input, size in answers if input.throughput is not None]
    assert len(decided) > 15
    for input, size in decided[5:]:
        assert input.fixed_shape
        best = max(goodput(other, input, model, fixed_shape=True) for other in range(*BOUNDS))
        assert goodput(size, input, model, fixed_shape=True) > best / 1.06


def test_those_that_read_the_throughput_say_so():
    assert [*filter(needs_throughput, EXAMPLES)] == [Goodput((32, 4096))]
    assert [*map(needs_throughput, FUNCTIONS)] == [False, False, False, True]
