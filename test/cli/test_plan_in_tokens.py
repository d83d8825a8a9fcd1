"""`vbs plan` and simulations count tokens, too: the dataset's size is its tokens, a microbatch `max_tokens`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.console import run_json
from helpers.properties import examples
from variable_batch_size.adaptive import ControlInput, Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation import simulate

pytestmark = pytest.mark.filterwarnings("ignore:With lengths= batch sizes are in tokens")


def rounds_of(sampler, epochs):
    """The rounds of each update."""
    batches = sampler.batches
    runs = [(number, batches.plan.epoch(number)) for number in range(epochs)]
    steps = [(number, step) for number, epoch in runs for step in range(epoch.first_step, epoch.end_step)]
    return [-(-len(batches.parts(*place)) // batches.world.size) for place in steps]


@given(
    st.lists(st.integers(1, 20), min_size=8, max_size=60),
    st.lists(st.integers(40, 90), min_size=1, max_size=6),
    st.integers(1, 3),
)
@examples(40)
def test_a_plan_has_the_updates_of_the_sampler_and_at_most_its_rounds(lengths, sizes, ranks):
    assume(sum(lengths) >= max(sizes))
    schedule = " ".join(f"{step}:{size}" for step, size in enumerate(sizes))
    command = ["--dataset-size", sum(lengths), "--microbatch", 20, "--world", ranks, "--epochs", 2]
    found = run_json("plan", schedule, *command)
    sampler = vbs.CustomSampler(len(lengths), schedule, ranks, 0, lengths=lengths, max_tokens=20, epochs=2)
    rounds = rounds_of(sampler, 2)
    assert found["updates"] == len(rounds)
    assert found["samples"] == 2 * sum(lengths)
    assert found["worlds"][0]["rounds"]["max"] <= max(rounds) + 1  # of batches that are a sample larger, or smaller
    assert [run["updates"] for run in found["updates_per_epoch"] for _ in range(run["epochs"])] == [
        sampler.plan.epoch(number).updates for number in range(2)
    ]


def grow(input: ControlInput) -> int:
    """Return 60 tokens, and 10 more every three updates."""
    return 60 + 10 * (input.updates // 3)


def test_a_simulation_has_the_batch_sizes_of_the_training():
    lengths = [1 + 7 * number % 20 for number in range(200)]
    adaptive = vbs.AdaptiveTrace(grow, every=3, delay=4, bounds=(40, 500))
    size = {"dataset_size": sum(lengths), "minibatch_size": 40}
    capacity = CapacityTrace(seconds=[0], nodes=[1], end=10**6)
    run = simulate(
        capacity, adaptive, throughput=Throughput.simple(64), ref_batchsize=60, until=25, by="updates", **size
    )
    sampler = vbs.CustomSampler(len(lengths), adaptive, 1, 0, lengths=lengths, max_tokens=40, max_updates=25)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD([weight], lr=0.1), sampler)
    made = 0
    for _ in vbs.remaining_epochs(sampler, optimizer):
        for update in vbs.updates(sampler, optimizer):
            made += optimizer.batch.batch_size
            for _ in update:
                optimizer.backward(weight.sum())
                optimizer.step()
    assert run.trace.batch_sizes(range(25)).tolist() == sampler.trace.batch_sizes(range(25)).tolist()
    assert abs(made - run.summary["samples"]) <= max(lengths)
