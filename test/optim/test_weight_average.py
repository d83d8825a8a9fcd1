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
        size = run.optimizer._cursor.made.batch_size  # type: ignore[union-attr]
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
    weights, other = run.weights(), copy.deepcopy(run.model)
    average.copy_to(other)
    for found, one in zip(other.parameters(), expected, strict=True):
        np.testing.assert_allclose(found.detach().numpy(), one, rtol=1e-12)
    for found, one in zip(run.weights(), weights, strict=True):
        np.testing.assert_array_equal(found, one)
    assert_averages(average, expected)


def test_averages_of_half_precision_keep_their_digits() -> None:
    model = network(torch.bfloat16)
    run = training(vbs.LinearRuleOptimizer, SIZES, model=model, dtype=torch.bfloat16)
    average = vbs.WeightAverage(model.parameters(), 0.999, run.optimizer)
    run.run(4)
    assert all(one.dtype == torch.float32 for one in average.averages)
    other = network(torch.bfloat16)
    average.copy_to(other)
    for one, written in zip(average.averages, other.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), written)


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


def test_an_update_that_is_committed_again_after_an_interrupt_is_averaged_once() -> None:
    run = training(sizes=SIZES)
    average, expected = averaged(run, 2)
    average.commit(updated=True)
    assert_averages(average, expected)


def test_a_rollback_misses_no_update() -> None:
    """The average is loaded before the optimizer, or after it."""
    whole, expected = averaged(training(sizes=SIZES), 3)
    for first in (True, False):
        run = training(sizes=SIZES)
        average = vbs.WeightAverage(run.model.parameters(), DECAY, run.optimizer)
        for updates in (2, 1):
            run.run(updates)
            if updates == 2:
                kept = copy.deepcopy((average.state_dict(), run.optimizer.state_dict(), run.model.state_dict()))
        several = [(average, kept[0]), (run.optimizer, kept[1])]
        for part, state in several if first else reversed(several):
            part.load_state_dict(state)  # type: ignore[attr-defined]
        run.model.load_state_dict(kept[2])
        run.run(1)
        assert_averages(average, expected)
    assert_averages(whole, expected)


def test_parameters_that_are_added_are_averaged_from_then_on() -> None:
    run = training(sizes=SIZES)
    average = vbs.WeightAverage(run.model.parameters(), DECAY, run.optimizer)
    run.run(1)
    added = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    run.optimizer.add_param_group({"params": [added]})
    run.run(1)
    assert len(average.averages) == 5
    before = run.optimizer.progress
    added.data.fill_(2.0)
    run.run(1)
    share = 1 - DECAY ** (run.optimizer.progress - before)
    np.testing.assert_allclose(average.averages[4].numpy(), 1 + share * (added.detach().numpy() - 1), rtol=1e-12)
    other = [*copy.deepcopy(run.model).parameters(), torch.nn.Parameter(torch.zeros_like(added))]
    average.copy_to(other)
    assert torch.equal(other[4], average.averages[4])
    with pytest.raises(
        ValueError, match=r"got a module, but the optimizer got 1 of them later; pass parameters in the"
    ):
        average.copy_to(copy.deepcopy(run.model))


@pytest.mark.parametrize("when", ["never", "copied", "saved", "restored"])
def test_parameters_that_are_added_begin_as_they_are_then(when: str) -> None:
    """Whoever looks at the averages before the next update, which changes them."""
    run = training(sizes=SIZES)
    average = vbs.WeightAverage(run.model.parameters(), DECAY, run.optimizer)
    run.run(1)
    added = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    handle = run.optimizer.inner.register_step_pre_hook(lambda *_: setattr(added, "grad", torch.ones_like(added)))
    run.optimizer.add_param_group({"params": [added]})
    if when == "copied":
        target = [*copy.deepcopy(run.model).parameters(), torch.zeros_like(added)]
        average.copy_to(target)
        assert torch.equal(target[4], added)
    elif when != "never":
        state = average.state_dict()
        assert len(state["averages"]) == 5
        if when == "restored":
            average.load_state_dict(state)
    before = run.optimizer.progress
    run.run(1)
    handle.remove()
    share = 1 - DECAY ** (run.optimizer.progress - before)
    expected = 1 + share * (added.detach().numpy() - 1)
    np.testing.assert_allclose(average.averages[4].numpy(), expected, rtol=1e-12)


def test_a_training_with_checkpoints_gets_an_average(tmp_path: Path) -> None:
    run = training(sizes=SIZES)
    run.run(2)
    with vbs.Checkpoint(tmp_path, model=run.model, optimizer=run.optimizer) as checkpoint:
        checkpoint.save()
    again = training(sizes=SIZES)
    average = vbs.WeightAverage(again.model.parameters(), DECAY, again.optimizer)
    with vbs.Checkpoint(tmp_path, model=again.model, optimizer=again.optimizer, average=average) as checkpoint:
        with pytest.raises(RuntimeError, match=r"average is not in it; pass the parts .* names, or strict=False"):
            checkpoint.restore()
        assert checkpoint.restore(strict=False)
    assert_averages(average, run.weights())
    assert again.optimizer.updates == 2


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
    with pytest.raises(ValueError, match=r"averages of a state must have the shapes of the 4 parameters"):
        average.load_state_dict({"version": 1, "averages": {}})
    with pytest.raises(RuntimeError, match=r"in another module than .* average\.copy_to\(evaluated\) before each"):
        average.applied()
    with pytest.raises(ValueError, match=r"to another module than .* got its own parameters; pass copy\.deepcopy"):
        average.copy_to(run.model)
    with pytest.raises(
        ValueError, match=r"must have the shapes of the 4 parameters .* got 2, or other shapes; pass a m"
    ):
        average.copy_to(torch.nn.Linear(2, 2))


def sharded() -> Any:
    model: Any = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model


def shard(backend: vbs.backend.Backend, folder: Path) -> dict[str, Any]:
    """What an evaluation of averages sees, again and again, and the weights of the training beside it."""
    model, other = sharded(), sharded()
    run = training(vbs.LinearRuleOptimizer, SIZES, model=model, backend=backend)
    average = vbs.WeightAverage(model.parameters(), DECAY, run.optimizer)
    seen = []
    for _ in SIZES:
        run.run(1)
        average.copy_to(other)
        with torch.no_grad():  # leaves the root gathered
            other(run.x)
            model(run.x)
        seen.append(other(run.x).detach().clone())
    with vbs.Checkpoint(folder, model=model, optimizer=run.optimizer, average=average) as checkpoint:
        checkpoint.save()
    own = average.state_dict()["averages"].values()
    with torch.no_grad():
        model(run.x)
    try:
        vbs.WeightAverage(model.parameters(), DECAY, run.optimizer)
    except ValueError as error:
        refused = str(error)
    return {"whole": list(own), "seen": seen, "weights": run.weights(), "x": run.x, "refused": refused}


@pytest.mark.slow("starts processes")
def test_a_sharded_model_is_trained_and_evaluated_as_a_whole_one(tmp_path: Path) -> None:
    alone = training(vbs.LinearRuleOptimizer, SIZES)
    average, other, seen = vbs.WeightAverage(alone.model.parameters(), DECAY, alone.optimizer), network(), []
    for _ in SIZES:
        alone.run(1)
        average.copy_to(other)
        seen.append(other(alone.x).detach())
    for rank in run_job("gloo", shard, tmp_path, ranks=2):
        found = [*rank["whole"], *rank["weights"], *rank["seen"]]
        for one, right in zip(found, [*average.averages, *alone.weights(), *seen], strict=True):
            np.testing.assert_allclose(one, right, rtol=1e-10)
        assert "one of a module that FSDP2 has gathered in a forward; create the average before" in rank["refused"]
    again = training(vbs.LinearRuleOptimizer, SIZES)
    later = vbs.WeightAverage(again.model.parameters(), DECAY, again.optimizer)
    with vbs.Checkpoint(tmp_path, model=again.model, optimizer=again.optimizer, average=later) as checkpoint:
        checkpoint.restore()
    assert_averages(later, [one.numpy() for one in average.averages])
