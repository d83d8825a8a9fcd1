"""No rank is idle where that is free: without a fixed shape, and if no optimizer compares microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.reference import assert_equal, examples, training, twin
from helpers.splitting import split_sizes
from variable_batch_size.testing import run_ranks

KINDS = [vbs.LinearRuleOptimizer, vbs.AdaScaleOptimizer]


def shares(kind: Any, sizes: list[int], world: int, **options: Any) -> tuple[list[list[int]], list[Any]]:
    """The samples of each rank's microbatches, and the weights at the end."""

    def train(backend: vbs.Backend) -> tuple[list[int], list[Any]]:
        run, found = training(kind, sizes, backend=backend, **options), []
        while run.optimizer.updates < len(sizes):
            run.sampler.set_epoch(run.optimizer.epoch)
            run.optimizer.set_epoch(run.optimizer.epoch)
            for indices in run.sampler:
                due = run.optimizer.microbatch
                assert len(indices) == due.rows
                found.append(due.samples)
                run.loss(indices).backward()
                run.optimizer.step()
                if run.optimizer.updates == len(sizes):
                    break
        return found, run.weights()

    found, weights = zip(*run_ranks(train, world), strict=True)
    return list(found), weights[0]


def test_the_example_of_eight_ranks() -> None:
    found, _ = shares(vbs.LinearRuleOptimizer, [128], 8, dataset_size=128, minibatch_size=32)
    assert found == [[16]] * 8
    found, _ = shares(vbs.AdaScaleOptimizer, [128], 8, dataset_size=128, minibatch_size=32)
    assert found == [[32]] * 4 + [[0]] * 4
    found, _ = shares(vbs.LinearRuleOptimizer, [128], 8, dataset_size=128, minibatch_size=32, noise="microbatches")
    assert found == [[32]] * 4 + [[0]] * 4


@given(
    kind=st.sampled_from(KINDS),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    world=st.integers(1, 6),
    minibatch_size=st.integers(1, 40),
)
@examples(60)
def test_ranks_share_a_step_and_the_update_stays_the_same(
    kind: Any, sizes: list[int], world: int, minibatch_size: int
) -> None:
    found, weights = shares(kind, sizes, world, minibatch_size=minibatch_size)
    assert_equal(weights, twin(kind, sizes, minibatch_size=minibatch_size), 1e-11)
    spread = 1 if kind is vbs.AdaScaleOptimizer else world
    first = split_sizes(sizes[0], minibatch_size, False, spread)
    begun = [sum(rank[: max(1, -(-(len(first) - number) // world))]) for number, rank in enumerate(found)]
    assert begun == [sum(first[number::world]) for number in range(world)]
    if spread > 1 and sizes[0] >= 2 * world:
        assert min(begun) >= 1
    assert minibatch_size <= 2 or sizes[0] == 1 or min(first) > 1  # no normalization layer sees a single sample


@pytest.mark.parametrize("measured_first", [True, False])
def test_a_sampler_of_several_optimizers_is_not_spread_if_one_measures(measured_first: bool) -> None:
    sampler = vbs.CustomSampler(128, 128, 8, 0, 32, fixed_shape=False)
    backend = vbs.testing.run_ranks(lambda backend: backend, 8)[0]

    def attach(noise: Any) -> vbs.CustomOptimizer:
        inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        return vbs.CustomOptimizer(inner, sampler, 32, rule="linear", noise=noise, backend=backend)

    optimizers = [attach(noise) for noise in (["microbatches", None] if measured_first else [None, "microbatches"])]
    assert [optimizer.microbatch.samples for optimizer in optimizers] == [32, 32]
    assert len(next(iter(sampler))) == 32


def test_an_iterator_that_was_made_before_the_optimizer_has_the_same_cut() -> None:
    sampler = vbs.CustomSampler(128, 128, 8, 0, 32, fixed_shape=False)
    backend = vbs.testing.run_ranks(lambda backend: backend, 8)[0]
    batches = iter(sampler)
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD([weight], lr=0.1), sampler, 32, backend=backend)
    assert len(next(batches)) == optimizer.microbatch.rows == 16
