"""Batch normalization: no microbatch of one sample without a fixed shape, and a warning where there are small ones."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.splitting import split_sizes
from variable_batch_size.optim.checks.normalization import ENOUGH
from variable_batch_size.testing import run_ranks


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()


def sampler_of(sizes, dataset_size=99, minibatch_size=32, **options):
    return vbs.CustomSampler(dataset_size, sizes, 1, 0, minibatch_size, on_end="hold", **options)


def warned(model, sampler):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        vbs.check_batch_norm(model, sampler)
    return [str(warning.message) for warning in found]


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    dataset_size=st.integers(60, 200),
    minibatch_size=st.integers(1, 40),
    fixed_shape=st.booleans(),
    drop_last=st.booleans(),
)
@examples(200)
def test_it_warns_exactly_where_a_microbatch_of_the_epoch_is_too_small(
    sizes, dataset_size, minibatch_size, fixed_shape, drop_last
):
    sampler = sampler_of(sizes, dataset_size, minibatch_size, fixed_shape=fixed_shape, drop_last=drop_last)
    epoch = sampler.plan.epoch(0)
    steps = [sampler.plan.step(epoch, number).batch_size for number in range(epoch.end_step)]
    smallest = min(min(split_sizes(size, minibatch_size, fixed_shape)) for size in steps)
    model, expected = mlp(), smallest < (min(ENOUGH, minibatch_size) if fixed_shape else 2)
    messages = warned(model, sampler)
    assert len(messages) == expected
    for message in messages:
        assert f"microbatches of {smallest} distinct sample" in message
        assert "GroupNorm" in message
        assert ("BatchTrace.round_to" in message) == fixed_shape
        if "drop_last=True" in message:  # then the step disappears with it
            kept = sampler_of(sizes, dataset_size, minibatch_size, fixed_shape=fixed_shape, drop_last=True)
            epoch, size = kept.plan.epoch(0), steps[-1]
            assert size not in {kept.plan.step(epoch, number).batch_size for number in range(epoch.end_step)} - {*sizes}
    assert warned(model, sampler) == []  # once


def test_the_remedies_help():
    trace = vbs.BatchTrace.from_sizes([33, 47], on_end="hold")
    assert warned(mlp(), vbs.CustomSampler(99, trace, 1, 0, 32, fixed_shape=True))
    assert warned(mlp(), vbs.CustomSampler(99, trace.round_to(32), 1, 0, 32, fixed_shape=True, drop_last=True)) == []
    assert warned(mlp(), vbs.CustomSampler(99, trace, 1, 0, 32, fixed_shape=False)) == []
    group_norm = nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(2, 8))
    assert warned(group_norm, vbs.CustomSampler(99, trace, 1, 0, 32, fixed_shape=True)) == []
    assert warned(mlp().eval(), vbs.CustomSampler(99, trace, 1, 0, 32, fixed_shape=True)) == []


def test_a_checkpoint_and_broadcast_parameters_see_the_model(tmp_path):
    def objects(backend):
        model, world = mlp(), backend.world
        sampler = vbs.CustomSampler(99, 33, world.size, world.rank, 32, on_end="hold", fixed_shape=True)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, sampler, vbs.ConstantOptimizer(inner, sampler, backend=backend)

    model, _, optimizer = objects(vbs.backend.LocalBackend())
    with pytest.warns(UserWarning, match="Batch normalization gets microbatches of 1 distinct sample, "):
        vbs.Checkpoint(tmp_path, model=model, optimizer=optimizer).close()

    def train(backend):
        model, sampler, optimizer = objects(backend)
        vbs.broadcast_parameters(model, backend)
        for indices in sampler:
            model(torch.randn(len(indices), 4).double()).mean().backward()
            if optimizer.step():
                return

    with pytest.warns(UserWarning, match="Batch normalization gets microbatches of 1 distinct sample, "):
        run_ranks(train, 2)
