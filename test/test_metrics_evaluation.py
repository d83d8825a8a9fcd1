"""Means over a whole dataset, exact for any world, against NumPy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.measured import HITS, VALUES
from helpers.properties import examples
from helpers.reference import assert_equal, training
from variable_batch_size.testing import run_ranks


class Evaluation:
    """An evaluation of the first `n` values on one rank."""

    def __init__(self, n, backend=None, minibatch_size=4, **options):
        backend = backend or vbs.backend.LocalBackend()
        world = backend.world
        self.sampler = vbs.EvaluationSampler(n, world.size, world.rank, minibatch_size, **options)
        self.metrics = vbs.Accumulator(self.sampler, backend=backend)
        dataset = TensorDataset(torch.from_numpy(VALUES[:n]), torch.from_numpy(HITS[:n]))
        self.loader = DataLoader(dataset, batch_sampler=self.sampler)

    def run(self, batches=None):
        """Evaluate, at most `batches` batches."""
        for number, (values, hits) in enumerate(self.loader):
            if number == batches:
                break
            self.metrics.add(value=values.mean(), hit=hits.double().mean())
        return self


def expected(n):
    return pytest.approx({"value": VALUES[:n].mean(), "hit": HITS[:n].mean(), "samples": n}, rel=1e-12)


@examples(60)
@given(
    n=st.integers(1, 120),
    world=st.integers(1, 6),
    minibatch_size=st.integers(1, 40),
    fixed_shape=st.booleans(),
    passes=st.integers(1, 2),
)
def test_means_are_over_all_samples(n, world, minibatch_size, fixed_shape, passes):
    def evaluate(backend):
        run = Evaluation(n, backend, minibatch_size, fixed_shape=fixed_shape)
        return [run.run().metrics.read() for _ in range(passes)]

    found = run_ranks(evaluate, world)
    assert found[0] == passes * [expected(n)]
    assert found == world * found[:1]


def test_read_and_add_take_no_all_reduce():
    def collectives(backend):
        run = Evaluation(10, backend).run()
        before = backend.collectives
        run.metrics.read()
        return before, backend.collectives

    assert run_ranks(collectives, 3) == 3 * [(0, 0)]


def test_several_calls_may_add_different_names_of_a_batch():
    for n in (3, 10):  # one batch, several batches
        run = Evaluation(n)
        for values, hits in run.loader:
            run.metrics.add(value=values.mean())
            run.metrics.add(hit=hits.double().mean())
        assert run.metrics.read() == expected(n)


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_a_loader_may_prefetch(options):
    run = Evaluation(30)
    run.loader = DataLoader(run.loader.dataset, batch_sampler=run.sampler, **options)
    for _ in range(2):
        assert run.run().metrics.read() == expected(30)


def test_values_of_an_inference_mode_are_accepted_and_read_in_any_mode():
    run = Evaluation(30)
    for _ in range(2):
        with torch.inference_mode():
            run.run()
            assert run.metrics.read() == expected(30)
        assert run.metrics.read() == expected(30)


def test_replays_have_no_weight_even_if_their_values_are_infinite():
    def evaluate(backend):
        run = Evaluation(2, backend)
        for _ in run.loader:
            run.metrics.add(loss=torch.tensor(torch.inf if run.sampler.samples(0) == 0 else 3.0))
        return run.metrics.read()

    assert run_ranks(evaluate, 3) == 3 * [{"loss": 3, "samples": 2}]


# ------------------------------------------------------------------------------------------------ incomplete passes


@pytest.mark.parametrize("world", [1, 3])
def test_an_incomplete_pass_raises_on_every_rank_and_the_next_pass_starts_again(world):
    def evaluate(backend):
        run = Evaluation(40, backend).run(batches=2 if backend.world.rank == world - 1 else None)
        with pytest.raises(RuntimeError, match=r"^each name needs a value for every batch, but rank") as caught:
            run.metrics.read()
        assert run.run().metrics.read() == expected(40)
        return str(caught.value)

    found = run_ranks(evaluate, world)
    assert found == world * found[:1]
    lacking = -(-10 // world) - 2
    assert f"rank {world - 1} lacks {lacking}; read after" in found[0]


def test_two_halves_of_a_pass_are_not_a_pass():
    run = Evaluation(40).run(batches=5).run(batches=5)
    with pytest.raises(RuntimeError, match="rank 0 lacks 5"):
        run.metrics.read()
    with pytest.raises(RuntimeError, match="rank 0 lacks 5"):
        run.metrics.state_dict()
    run.metrics.reset()
    assert run.metrics.read() == {"samples": 0}


def test_a_name_of_some_batches_raises():
    run = Evaluation(40)
    for number, (values, _) in enumerate(run.loader):
        run.metrics.add(value=values.mean(), **({"late": 1.0} if number else {}))
    with pytest.raises(RuntimeError, match="rank 0 lacks 1"):
        run.metrics.read()


def test_a_value_too_many_raises():
    run = Evaluation(40).run()
    with pytest.raises(RuntimeError, match=r"^a batch takes one .* 'value' was added 11 times in a pass of 10 batches"):
        run.metrics.add(value=1.0)
    assert run.metrics.read() == expected(40)
    run.metrics.reset()  # a loader that does not read this sampler: the user says where a pass begins
    for start in range(0, 40, 4):
        run.metrics.add(value=VALUES[start : start + 4].mean(), hit=HITS[start : start + 4].mean())
    assert run.metrics.read() == expected(40)


# ------------------------------------------------------------------------------------------------ beside a training


def test_an_evaluation_does_not_disturb_the_training_in_whose_epoch_it_runs():
    def train(backend, evaluate):
        run, evaluation = training(backend=backend), Evaluation(50, backend)
        metrics = vbs.Accumulator(run.optimizer)
        for indices in run.sampler:
            metrics.add(value=VALUES[indices].mean())
            run.loss(indices).backward()
            if run.optimizer.step() and evaluate:
                assert evaluation.run().metrics.read() == expected(50)
        return run.weights(), metrics.read()

    for (weights, means), (other, other_means) in zip(
        run_ranks(lambda backend: train(backend, False), 2),
        run_ranks(lambda backend: train(backend, True), 2),
        strict=True,
    ):
        assert_equal(weights, other, 0)
        assert means == other_means
        assert means["samples"] == 50


def test_the_state_of_a_complete_pass_is_restored_until_the_next_pass():
    state = Evaluation(40).run().metrics.state_dict()
    other = Evaluation(20)
    other.metrics.load_state_dict(state)
    assert other.metrics.read() == expected(40)
    assert other.run().metrics.read() == expected(20)


# ------------------------------------------------------------------------------------------------------- arguments
