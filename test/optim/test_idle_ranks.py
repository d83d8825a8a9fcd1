"""No rank is idle in a step that has a sample for each, unless the result depends on how the step is split."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import assert_equal, filled, network, training, twin, wrap
from helpers.splitting import split_sizes
from variable_batch_size.testing import run_ranks


def dealt(run):
    """The samples that count, of each microbatch of this rank in the next update; its rows come from the sampler."""
    samples = []
    for indices in run.sampler:
        due = run.optimizer.microbatch
        assert len(indices) == due.rows
        samples.append(due.samples)
        run.loss(indices).backward()
        if run.optimizer.step():
            return samples
    raise AssertionError("the epoch has no update")


def in_world(size, batch, minibatch_size, **options):
    """The samples of the microbatches of an update, in their order."""
    model = options.pop("model", None)

    def train(backend):
        own = {} if model is None else {"model": model()}
        run = training(vbs.ConstantOptimizer, [batch], backend=backend, minibatch_size=minibatch_size, **own, **options)
        assert len(run.sampler) == len(list(run.sampler))  # the epoch is one update
        run.optimizer.discard_step()
        return dealt(run)

    options["dataset_size"] = batch
    ranks = run_ranks(train, size)
    return [rank[number] for number in range(len(ranks[0])) for rank in ranks if number < len(rank) and rank[number]]


@examples(60)
@given(
    batch=st.integers(1, 80),
    minibatch_size=st.integers(1, 40),
    world=st.integers(1, 9),
    fixed_shape=st.booleans(),
    noise=st.sampled_from([None, None, "microbatches", "differenced"]),
)
def test_every_rank_has_a_share_if_there_are_samples(batch, minibatch_size, world, fixed_shape, noise):
    sizes = in_world(world, batch, minibatch_size, sampling={"fixed_shape": fixed_shape}, noise=noise)
    assert sizes == split_sizes(batch, minibatch_size, fixed_shape, 1 if noise else world)
    assert fixed_shape or noise or len(sizes) == batch or len(sizes) % world == 0


# ------------------------------------------------------------------------------------------------ batch normalization


def normalized(layer=nn.BatchNorm1d):
    return filled(nn.Sequential(nn.Linear(3, 4), layer(4), nn.Linear(4, 2)).double())


class OwnNorm(nn.BatchNorm1d):
    """A user's subclass."""


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, OwnNorm])
@pytest.mark.parametrize("batch", [2, 5, 8, 11, 40])
def test_batch_normalization_never_sees_one_sample_of_several(layer, batch):
    """It would raise in torch; and its statistics, with them the updates, do not depend on the number of ranks."""
    assert in_world(4, batch, 8, model=lambda: normalized(layer)) == split_sizes(batch, 8)

    def train(backend):
        return training(vbs.ConstantOptimizer, [batch], model=normalized(layer), backend=backend, minibatch_size=8).run(
            3
        )

    expected = train(vbs.backend.LocalBackend()).weights()
    for rank in run_ranks(train, 3):
        assert_equal(rank.weights(), expected, 1e-9)


def test_other_normalization_is_spread():
    assert in_world(4, 20, 8, model=lambda: normalized(nn.LayerNorm)) == split_sizes(20, 8, False, 4)
    assert in_world(4, 20, 8, model=lambda: normalized(lambda n: nn.GroupNorm(2, n))) == split_sizes(20, 8, False, 4)


@pytest.mark.parametrize("affine", [True, False])
def test_frozen_batch_normalization_is_found_in_a_model_that_was_broadcast(affine):
    def train(backend):
        models = [normalized(lambda n: nn.BatchNorm1d(n, affine=affine)) for _ in range(2)]
        vbs.broadcast_parameters(models[1], backend)
        found = []
        for model in models:
            world = backend.world
            sampler = vbs.CustomSampler(20, 20, world.size, world.rank, 8, fixed_shape=False)
            vbs.ConstantOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), sampler, backend=backend)
            found.append(sampler.dealing.multiple_of)
        return found[0], found[1]

    assert run_ranks(train, 3) == [(3, 1)] * 3


def test_ranks_with_other_models_are_told():
    def train(backend):
        layer = nn.BatchNorm1d if backend.world.rank else nn.LayerNorm
        run = training(vbs.ConstantOptimizer, [20], model=normalized(layer), backend=backend, minibatch_size=8)
        with pytest.raises(RuntimeError) as error:
            run.run(1)
        return str(error.value)

    for message in run_ranks(train, 2):
        assert (
            "the same divisor of the number of microbatches, but it is 2 on rank 0 and 1 on rank 1; train the"
            in message
        )


# ----------------------------------------------------------------------------------------- several optimizers and loops


@pytest.mark.parametrize("measures_first", [True, False])
def test_one_optimizer_that_measures_decides_for_all_of_a_sampler(measures_first):
    sizes = [12, 7, 3]
    kinds = [vbs.AdaScaleOptimizer, vbs.ConstantOptimizer][:: 1 if measures_first else -1]

    def train(backend):
        run = training(kinds[0], sizes, minibatch_size=8, backend=backend)
        model, rows = network(), []
        other = wrap(kinds[1], torch.optim.SGD(model.parameters(), lr=0.02), run.sampler, backend=backend)
        for indices in run.sampler:
            rows.append(len(indices))
            run.loss(indices).backward()
            updated = run.optimizer.step()
            (model(run.x[indices]) - run.target[indices]).square().sum(dim=1).mean().backward()
            assert other.step() == updated
        return [run.weights(), [parameter.detach().numpy() for parameter in model.parameters()]], rows

    alone, _ = train(vbs.backend.LocalBackend())
    for weights, rows in run_ranks(train, 4):
        assert rows[:3] == [6, 7, 3]  # 12 = 6 + 6 and two replays, not 3 on each rank
        for found, expected in zip(weights, alone, strict=True):
            assert_equal(found, expected, 1e-9)


def test_an_optimizer_that_measures_and_comes_late_needs_a_new_loop():
    """Nothing is weighed by another split than it has."""

    def train(backend):
        run = training(vbs.ConstantOptimizer, [3, 10], backend=backend, minibatch_size=3).run(1)
        first = next(iter(run.sampler))
        assert run.optimizer.microbatch.samples == 2  # five of two samples
        late = nn.Parameter(torch.zeros(()))
        other = vbs.AdaScaleOptimizer(torch.optim.SGD([late], lr=0.1), run.sampler, 10, backend=backend)
        run.loss(first).backward()
        late.sum().backward()
        for optimizer in (run.optimizer, other):
            with pytest.raises(RuntimeError, match=r"start a new one after set_epoch\(\), .* an optimizer is created"):
                optimizer.step()
            optimizer.discard_step()
        run.run(1)
        assert_equal(run.weights(), twin(vbs.ConstantOptimizer, [3, 10], minibatch_size=3))

    run_ranks(train, 5)


@pytest.mark.parametrize(
    ("size", "sizes", "message"),
    [
        (4, [8] * 50, "2 of 4; pass minibatch_size=2"),
        (3, [8] * 50, "1 of 3; pass minibatch_size=3"),
        (2, [8] * 50, ""),
        (4, [16] + [8] * 50, "2 of 4; pass minibatch_size=2"),
        (4, [8] * 40 + [16] * 10 + [8] * 20, "2 of 4; pass minibatch_size=2"),
        (4, [8, 16] * 50, ""),
    ],
)
def test_ranks_that_measured_noise_leaves_idle_are_warned_of(size, sizes, message):
    def train(backend):
        run = training(vbs.AdaScaleOptimizer, sizes, backend=backend, minibatch_size=4, dataset_size=sum(sizes))
        for indices in run.sampler:
            run.loss(indices).backward()
            run.optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(train, size)
    assert len(caught) == (size if message else 0)
    assert all(message in str(one.message) for one in caught)


def test_a_restored_estimate_of_the_noise_is_one():
    """Of updates of a single microbatch, a run does not say then that the noise could not be estimated."""

    def begun():
        return training(vbs.AdaScaleOptimizer, [8, 8] + [4] * 60, minibatch_size=4, dataset_size=256)

    state = begun().run(2).optimizer.state_dict()
    run = begun()
    run.optimizer.load_state_dict(state)
    run.run(60)  # a warning would be an error
