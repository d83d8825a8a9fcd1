"""Averages of the weights: their decay follows the progress of each update, so that a trace leaves their horizon."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import variable_batch_size as vbs
from helpers.processes import run_job
from helpers.properties import examples
from helpers.reference import REF, Training, network, training
from helpers.twins import Array

DECAY = 0.9
SIZES = [8, 16, 2, 12, 4]


def averaged(run: Training, updates: int, by: Any = "progress") -> tuple[vbs.WeightAverage, list[Array]]:
    """Train, and return the averages with those of the equation."""
    average = vbs.WeightAverage(run.model.parameters(), DECAY, run.optimizer, by=by)
    expected = [parameter.detach().numpy().copy() for parameter in run.model.parameters()]
    for _ in range(updates):
        before = run.optimizer.progress
        run.run(1)
        size = run.optimizer._loop.made.batch_size  # type: ignore[union-attr]
        k = run.optimizer.progress - before if by == "progress" else size / REF
        pairs = zip(expected, run.weights(), strict=True)
        expected = [DECAY**k * old + (1 - DECAY**k) * new for old, new in pairs]
    return average, expected


def assert_averages(average: vbs.WeightAverage, expected: list[Array]) -> None:
    for found, one in zip(average.averages, expected, strict=True):
        np.testing.assert_allclose(found.numpy(), one, rtol=1e-12)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from(["progress", "samples"]), st.booleans())
@examples(60)
def test_the_decay_is_a_power_of_the_progress(sizes: list[int], by: Any, measured: bool) -> None:
    kind = vbs.AdaScaleOptimizer if measured else vbs.LinearRuleOptimizer
    assert_averages(*averaged(training(kind, sizes), len(sizes), by))


def test_by_samples_the_rule_does_not_matter() -> None:
    run = training(vbs.ConstantOptimizer, SIZES, ref_batchsize=REF)
    average, expected = averaged(run, len(SIZES), "samples")
    assert_averages(average, expected)
    assert run.optimizer.progress == len(SIZES)  # of the constant rule, by which the decay would be a fixed one


def test_ranks_have_the_averages_of_one(tmp_path: Path) -> None:
    _, expected = averaged(training(vbs.LinearRuleOptimizer, SIZES), len(SIZES))

    def one(backend: vbs.backend.Backend) -> vbs.WeightAverage:
        return averaged(training(vbs.LinearRuleOptimizer, SIZES, backend=backend), len(SIZES))[0]

    for average in vbs.testing.run_ranks(one, 3):
        assert_averages(average, expected)


def test_an_evaluation_sees_the_averages_and_leaves_the_weights() -> None:
    run = training(sizes=SIZES)
    average, expected = averaged(run, 3)
    weights = [one.copy() for one in run.weights()]
    with average.applied():
        for found, one in zip(run.weights(), expected, strict=True):
            np.testing.assert_allclose(found, one, rtol=1e-12)
    for found, one in zip(run.weights(), weights, strict=True):
        np.testing.assert_array_equal(found, one)
    assert_averages(average, expected)


def leave_by_an_exception(average: vbs.WeightAverage) -> None:
    with average.applied():
        raise ZeroDivisionError


def test_an_exception_in_an_evaluation_leaves_the_weights() -> None:
    run = training(sizes=SIZES)
    average, _ = averaged(run, 3)
    weights = [one.copy() for one in run.weights()]
    with pytest.raises(ZeroDivisionError):
        leave_by_an_exception(average)
    for found, one in zip(run.weights(), weights, strict=True):
        np.testing.assert_array_equal(found, one)


def test_averages_of_half_precision_keep_their_digits() -> None:
    model = network(torch.bfloat16)
    run = training(vbs.LinearRuleOptimizer, SIZES, model=model, dtype=torch.bfloat16)
    average = vbs.WeightAverage(model.parameters(), 0.999, run.optimizer)
    run.run(4)
    assert all(one.dtype == torch.float32 for one in average.averages)
    before = copy.deepcopy(average.averages)
    with average.applied():
        assert all(one.dtype == torch.bfloat16 for one in model.parameters())
    for one, other in zip(average.averages, before, strict=True):
        assert torch.equal(one, other)


def test_a_training_resumes_with_its_averages(tmp_path: Path) -> None:
    whole, expected = averaged(training(sizes=SIZES), len(SIZES))
    run = training(sizes=SIZES)
    average, _ = averaged(run, 2)
    with vbs.Checkpoint(tmp_path, model=run.model, optimizer=run.optimizer, average=average) as checkpoint:
        checkpoint.save()
    again = training(sizes=SIZES)
    later = vbs.WeightAverage(again.model.parameters(), DECAY, again.optimizer)
    with vbs.Checkpoint(tmp_path, model=again.model, optimizer=again.optimizer, average=later) as checkpoint:
        checkpoint.restore()
    again.run(len(SIZES) - 2)
    assert_averages(later, expected)
    assert_averages(whole, expected)


def test_an_update_that_was_skipped_leaves_the_averages() -> None:
    run = training(vbs.AdaScaleOptimizer, SIZES)
    average = vbs.WeightAverage(run.model.parameters(), DECAY, run.optimizer)
    run.run(1)
    before = copy.deepcopy(average.averages)
    run.x[:] = torch.inf
    with pytest.warns(RuntimeWarning, match="Skipped an update"):
        list(run.steps())
    assert run.optimizer.updates > 1
    for one, other in zip(average.averages, before, strict=True):
        assert torch.equal(one, other)


def test_wrong_usage_is_refused() -> None:
    run, other = training(sizes=SIZES), training(vbs.ConstantOptimizer, SIZES, ref_batchsize=None)
    parameters = [*run.model.parameters()]
    for decay in (1, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"decay"):
            vbs.WeightAverage(parameters, decay, run.optimizer)
    with pytest.raises(TypeError, match=r"optimizer must be a vbs\.CustomOptimizer"):
        vbs.WeightAverage(parameters, DECAY, run.optimizer.inner)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"parameters must be floating-point tensors"):
        vbs.WeightAverage([torch.ones(2, dtype=torch.int64)], DECAY, run.optimizer)
    with pytest.raises(ValueError, match=r"there must be weights to average"):
        vbs.WeightAverage([], DECAY, run.optimizer)
    with pytest.raises(ValueError, match=r'by="samples" needs a ref_batchsize'):
        vbs.WeightAverage(parameters, DECAY, other.optimizer, by="samples")
    average = vbs.WeightAverage(parameters, DECAY, run.optimizer)
    with pytest.raises(ValueError, match=r"must be of the 4 parameters here"):
        average.load_state_dict({"version": 1, "averages": {}})
    with average.applied():
        with pytest.raises(RuntimeError, match=r"applied already"):
            leave_by_an_exception(average)
        with pytest.raises(RuntimeError, match=r"taken outside the block"):
            average.state_dict()
        with pytest.raises(RuntimeError, match=r"loaded outside the block"):
            average.load_state_dict({})


def test_training_and_saving_while_averages_are_applied_change_nothing(tmp_path: Path) -> None:
    """A microbatch, a checkpoint with and without the averages, a restore."""
    whole, expected = averaged(training(sizes=SIZES), len(SIZES))
    run = training(sizes=SIZES)
    average, _ = averaged(run, 2)
    several: list[dict[str, Any]] = [{}, {"average": average}]
    for parts in several:
        folder = tmp_path / str(len(parts))
        with vbs.Checkpoint(folder, model=run.model, optimizer=run.optimizer, **parts) as checkpoint:
            checkpoint.save()
            weights = run.weights()
            with average.applied():
                for refused in (checkpoint.save, checkpoint.restore):
                    with pytest.raises(RuntimeError, match=r"outside the block"):
                        refused()
            for found, one in zip(run.weights(), weights, strict=True):
                np.testing.assert_array_equal(found, one)
    with average.applied(), pytest.raises(RuntimeError, match=r"step\(\) must be called outside the block"):
        list(run.steps())
    with average.applied(), pytest.raises(RuntimeError, match=r"backward\(\) must be called outside the block"):
        run.optimizer.backward(run.model(run.x).sum())
    run.optimizer.discard_step()
    run.run(len(SIZES) - 2)
    assert_averages(average, expected)
    assert_averages(whole, expected)


def shard(backend: vbs.backend.Backend) -> tuple[list[Any], list[Array]]:
    """The whole averages of a sharded model, and the weights while they are applied."""
    model: Any = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    run = training(vbs.LinearRuleOptimizer, SIZES, model=model, backend=backend)
    average = vbs.WeightAverage(model.parameters(), DECAY, run.optimizer)
    run.run(len(SIZES))
    whole: list[Any] = [one.full_tensor() for one in average.averages]  # type: ignore[attr-defined]
    with average.applied():
        seen = [one.copy() for one in run.weights()]
    return whole, seen


@pytest.mark.slow("starts processes")
def test_averages_are_sharded_as_the_weights_are() -> None:
    _, expected = averaged(training(vbs.LinearRuleOptimizer, SIZES), len(SIZES))
    for whole, seen in run_job("gloo", shard, ranks=2):
        for found, shown, one in zip(whole, seen, expected, strict=True):
            np.testing.assert_allclose(found.numpy(), one, rtol=1e-12)
            np.testing.assert_allclose(shown, one, rtol=1e-12)
