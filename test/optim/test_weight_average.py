"""Averages of the weights: their decay follows the progress of each update, so that a trace leaves their horizon."""

import copy

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
from helpers.reference import REF, network, training
from variable_batch_size.testing import run_ranks

DECAY = 0.9
SIZES = [8, 16, 2, 12, 4]


def averaged(run, updates, by="progress"):
    """Train, and return the averages with those of the equation."""
    average = vbs.WeightAverage(run.model.parameters(), DECAY, run.optimizer, by=by)
    expected = [parameter.detach().numpy().copy() for parameter in run.model.parameters()]
    for _ in range(updates):
        before, size = run.optimizer.progress, run.optimizer.batch.batch_size
        run.run(1)
        k = run.optimizer.progress - before if by == "progress" else size / REF
        pairs = zip(expected, run.weights(), strict=True)
        expected = [DECAY**k * old + (1 - DECAY**k) * new for old, new in pairs]
    return average, expected


def assert_averages(average, expected):
    for found, one in zip(average.averages, expected, strict=True):
        np.testing.assert_allclose(found.numpy(), one, rtol=1e-12)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from(["progress", "samples"]), st.integers(1, 3)
)
@examples(60)
def test_the_decay_is_a_power_of_the_progress(sizes, by, world):
    kind = (vbs.AdaScaleOptimizer, vbs.LinearRuleOptimizer, vbs.RootRuleOptimizer)[len(sizes) % 3]
    for found in run_ranks(lambda backend: averaged(training(kind, sizes, backend=backend), len(sizes), by), world):
        assert_averages(*found)


def test_averages_of_half_precision_keep_their_digits():
    model = network(torch.bfloat16)
    run = training(vbs.LinearRuleOptimizer, SIZES, model=model, dtype=torch.bfloat16)
    average = vbs.WeightAverage(model.parameters(), 0.999, run.optimizer)
    run.run(4)
    assert all(one.dtype == torch.float32 for one in average.averages)
    other = network(torch.bfloat16)
    average.copy_to(other)
    for one, written in zip(average.averages, other.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), written)


def test_an_update_that_was_skipped_leaves_the_averages():
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


def test_a_rollback_misses_no_update():
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
            part.load_state_dict(state)
        run.model.load_state_dict(kept[2])
        run.run(1)
        assert_averages(average, expected)
    assert_averages(whole, expected)


@pytest.mark.parametrize("when", ["never", "copied", "saved", "restored"])
def test_parameters_that_are_added_begin_as_they_are_then(when):
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


def test_a_training_with_checkpoints_gets_an_average(tmp_path):
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


def sharded():
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model


def shard(backend, folder):
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
def test_a_sharded_model_is_trained_and_evaluated_as_a_whole_one(tmp_path):
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
        assert "one of a module that FSDP2 has gathered in a forward pass; create the average before" in rank["refused"]
    again = training(vbs.LinearRuleOptimizer, SIZES)
    later = vbs.WeightAverage(again.model.parameters(), DECAY, again.optimizer)
    with vbs.Checkpoint(tmp_path, model=again.model, optimizer=again.optimizer, average=later) as checkpoint:
        checkpoint.restore()
    assert_averages(later, [one.numpy() for one in average.averages])
