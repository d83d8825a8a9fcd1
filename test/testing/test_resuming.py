"""`assert_resumes_identically`, on every optimizer of the package and on trainings that do not resume identically."""

from __future__ import annotations

import pytest
import torch

import variable_batch_size as vbs
from helpers.reference import EQUATIONS, SIZES, data, training
from variable_batch_size.testing import assert_resumes_identically, run_ranks

X, TARGET = data(50)


def loss(model, indices):
    output = model(X[indices])
    return (output - TARGET[indices]).square().sum(dim=1).mean()


def builder(kind, **options):
    def build(backend):
        run = training(kind, SIZES, backend=backend, **options)
        return run.model, run.sampler, run.optimizer

    return build


@pytest.mark.parametrize(
    ("kind", "inner", "options"),
    [(kind, inner, {}) for kind, equation in EQUATIONS.items() for inner in equation.inners]
    + [(kind, equation.inners[0], {"noise": "differenced"}) for kind, equation in EQUATIONS.items() if equation.noise],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_optimizer_resumes_identically(kind, inner, options):
    assert_resumes_identically(builder(kind, inner=inner, **options), loss, updates=12, seed=1)


def test_finds_state_that_updates_read_and_state_dict_omits():
    def build(backend):
        calls = []

        def rule(update):
            calls.append(update.batch_size)
            return vbs.rules.Scaling(lr=len(calls))

        return builder(vbs.CustomOptimizer, rule=rule)(backend)

    message = (
        r"model\['0.weight'\] differs after 12 updates in parts of .*, seed 7; save everything that an update reads"
    )
    with pytest.raises(AssertionError, match=message):
        assert_resumes_identically(build, loss, updates=12, seed=7)


def test_a_training_that_ends_before_raises():
    build = builder(vbs.LinearRuleOptimizer, sampling={"max_updates": 5})
    with pytest.raises(ValueError, match="must have 12 updates, but it ends after 5; pass fewer updates, or a sampler"):
        assert_resumes_identically(build, loss, updates=12, seed=1)


def with_lr_by_world(backend):
    """Build a training whose learning rate depends on the world."""
    model, sampler, optimizer = builder(vbs.LinearRuleOptimizer)(backend)
    optimizer.param_groups[0]["lr"] *= backend.world.size
    return model, sampler, optimizer


def test_finds_a_dependence_on_the_world_with_another_seed_at_each_call():
    seeds = set()
    for _ in range(3):
        with pytest.raises(AssertionError, match="differs after 6 updates") as error:
            assert_resumes_identically(with_lr_by_world, loss, updates=6, worlds=(2,))
        seeds.add(str(error.value).rpartition("seed ")[2].split(";")[0])
    assert len(seeds) == 3


def test_ranks_that_sum_different_tensors_are_told():
    def different(backend):
        backend.all_reduce_sum([torch.ones(1 + backend.world.rank)])

    with pytest.raises(RuntimeError, match=r"same shapes and dtypes, but rank 0 has \[\(\(1,\), torch.float32\)\] and"):
        run_ranks(different, 2)
