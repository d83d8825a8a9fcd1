"""Checkpoints on real files: what they restore, and what they reject."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import variable_batch_size as vbs
from helpers.checkpoints import (
    STATE,
    checkpoint,
    names,
    path_of,
    restore_checkpoint,
    save_checkpoint,
    two_saved,
    updates,
)
from helpers.processes import run_job
from helpers.reference import SIZES, assert_equal, training
from helpers.xla_checkpoints import restore, save
from helpers.xla_training import XlaCase
from variable_batch_size.checkpoint.contents import MANIFEST
from variable_batch_size.testing import run_ranks

STOP = 3
STATES = {
    "linear": functools.partial(training, vbs.LinearRuleOptimizer),
    "adascale": functools.partial(training, vbs.AdaScaleOptimizer),
    "differenced": functools.partial(training, vbs.AdaScaleOptimizer, noise="differenced"),
    "adam": functools.partial(training, vbs.SqrtSDERuleOptimizer),
}


@pytest.fixture
def saved(tmp_path):
    return two_saved(tmp_path / "saved")


# ----------------------------------------------------------------------------------------------------- what is restored


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 1), (1, 2)])
def test_a_restored_training_equals_an_uninterrupted_one(state, before, after, tmp_path):
    def train(backend):
        run = STATES[state](backend=backend).run(STOP)
        save_checkpoint(tmp_path, run)

    def resume(backend):
        run = STATES[state](backend=backend).run(1)  # the restore overwrites this update
        restore_checkpoint(tmp_path, run)
        assert run.optimizer.updates == run.sampler.state_dict()["step"] == STOP
        return run.run(len(SIZES) - STOP)

    run_ranks(train, before)
    uninterrupted = STATES[state]().run(len(SIZES))
    for rank in run_ranks(resume, after):
        assert_equal(rank.weights(), uninterrupted.weights())
        assert rank.optimizer.progress == pytest.approx(uninterrupted.optimizer.progress, rel=1e-12)


def test_rng_states_are_restored_in_a_world_of_the_same_size_only(tmp_path):
    def draw():
        return torch.rand(()).item(), np.random.random(), random.random()

    def seed(number):
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)

    seed(1)
    run = training().run(1)
    with checkpoint(tmp_path, run) as saves:
        saves.save()
        expected = draw()
        saves.restore()
        assert draw() == expected

    def restore_in_another_world(backend):
        with checkpoint(tmp_path, training(backend=backend)) as saves:
            seed(2)
            backend._gather_bytes(b"")
            assert saves.restore()

    run_ranks(restore_in_another_world, 2)
    drawn = draw()
    seed(2)
    assert draw() == drawn


def test_the_manifest_holds_the_position_of_the_training(saved):
    facts = json.loads((path_of(saved, 2) / MANIFEST).read_text())
    assert {name: facts[name] for name in ("epoch", "step", "samples", "updates")} == {
        **{"epoch": 0, "step": 2, "samples": sum(SIZES[:2]), "updates": 2}
    }
    assert facts["trace"] == training().sampler.batches.fingerprint()["trace"]
    assert facts["file"]["bytes"] == (path_of(saved, 2) / STATE).stat().st_size
    parts = vbs.read_checkpoint(path_of(saved, 2))["parts"]
    assert set(parts) == set(facts["state"]) == {"model", "optimizer", "sampler"}
    assert parts["model"]._metadata == training().model.state_dict()._metadata


# ----------------------------------------------------------------------------------------------------- what is rejected


def test_rejects_missing_and_unknown_parts_by_name(saved):
    run = training()
    weights = [weight.copy() for weight in run.weights()]
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 2)
    with (
        vbs.Checkpoint(saved, model=run.model, optimizer=run.optimizer, scheduler=schedule) as saves,
        pytest.raises(RuntimeError, match="other parts than this training: scheduler is not in it; pass the"),
    ):
        saves.restore()
    assert_equal(run.weights(), weights, 0)


def test_rejects_another_model_before_anything_changes(saved):
    run = training(model=nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double())
    weights = [weight.copy() for weight in run.weights()]
    expected = r"update-00000002\S+ is of another model: the shape of 0.weight is \(4, 3\) in it and \(5, 3\) here; cr"
    with checkpoint(saved, run) as saves, pytest.raises(RuntimeError, match=expected):
        saves.restore()
    assert_equal(run.weights(), weights, 0)
    assert run.optimizer.updates == 0


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_warns_of_other_dtypes_and_names_a_tensor(before, after, world, tmp_path):
    save_checkpoint(tmp_path, training(dtype=before).run(1))

    def restore(backend):
        run = training(backend=backend, dtype=after)
        with checkpoint(tmp_path, run) as saves:
            assert saves.restore()
        return run

    expected = (
        rf"update-00000001\S+ is converted to other dtypes, 0.weight \(and 3 others\) from {before} to {after}, so "
        rf"that .*; call model.to\({before}\) before the optimizer is created$"
    )
    with pytest.warns(UserWarning, match=expected) as warned:
        runs = run_ranks(restore, world)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    for run in runs:
        assert_equal(run.weights(), training(dtype=before).run(1).weights(), 1e-6)


@pytest.mark.parametrize("keep", [1, 9])
@pytest.mark.parametrize("made", [1, 2, 5])
def test_a_new_training_does_not_save_beside_checkpoints_that_it_has_not_restored(made, keep, saved):
    """It may have made fewer updates, as many, or more; one that was in the folder goes on without a restore."""
    run, before = training().run(made), names(saved)
    expected = (
        rf"update-00000002-0001-2-1 is not one of this run, which has made {made} updates, .*; restore\(\) it "
        r"first; another folder begins a different run"
    )
    with checkpoint(saved, run, keep=keep) as saves:
        for wait in (True, False):
            with pytest.raises(RuntimeError, match=expected):
                saves.save(wait=wait)
        assert not saves.restore(best=True)
        with pytest.raises(RuntimeError, match=expected):
            saves.save()
    assert names(saved) == before
    run = training()
    restore_checkpoint(saved, run)
    with checkpoint(saved, run, keep=keep) as saves:
        run.run(1)
        saves.save()
    assert updates(saved) == ([3] if keep == 1 else [1, 2, 3])


def test_an_error_of_one_rank_is_told_where_a_later_part_communicates(tmp_path):
    """The state of metrics is a sum over the ranks, in which the others would wait for this one."""

    class Fails:
        broken = False

        def state_dict(self):
            if self.broken:
                raise KeyError("its file is gone")
            return {}

        def load_state_dict(self, state):
            pass

    def train(backend):
        run, part = training(backend=backend), Fails()
        with checkpoint(tmp_path, run, part=part, metrics=vbs.Accumulator(run.optimizer)) as saves:
            run.run(1)
            saves.save()
            part.broken = backend.world.rank == 1
            with pytest.raises(RuntimeError, match="its file is gone"):
                saves.save()
            part.broken = False
            saves.save()

    run_ranks(train, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_a_restore_that_was_interrupted_has_to_be_called_again_before_a_save(world, saved):
    """As by Ctrl-C in a notebook, on the last rank, when the optimizer is loaded and the model is not."""

    def interrupt(_):
        raise KeyboardInterrupt if world == 1 else KeyError  # threads get no Ctrl-C

    def train(backend):
        run = training(backend=backend)
        with checkpoint(saved, run) as saves:
            loader = saves._parts._names
            if backend.world.rank == world - 1:
                loader.load_model = interrupt
            with pytest.raises((KeyboardInterrupt, RuntimeError)):
                saves.restore()
            vars(loader).pop("load_model", None)
            told = r"the restore of \S+/update-00000002-0001-2-1 did not come to its end, .*; call restore\(\) again"
            for wait in (True, False):
                with pytest.raises(RuntimeError, match=told):
                    saves.save(wait=wait)
            assert saves.restore()
            run.run(1)
            saves.save()
        assert_equal(run.weights(), training().run(3).weights(), 1e-9)

    run_ranks(train, world)
    assert updates(saved) == [2, 3]


def test_save_within_an_accumulation_raises_on_every_rank(tmp_path):
    errors = []

    def train(backend):
        run = training(backend=backend, minibatch_size=2)
        with checkpoint(tmp_path, run) as saves:
            next(run.steps())
            try:
                saves.save()
            except RuntimeError as error:
                errors.append(str(error))

    run_ranks(train, 2)
    assert len(errors) == 2
    assert all("must be called between steps" in text for text in errors)
    assert updates(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("keep", 0, ValueError),
        ("keep", 1.5, TypeError),
        ("every", 0, ValueError),
        ("every", -timedelta(1), ValueError),
        ("model", 3, TypeError),
        ("optimizer", 3, TypeError),
        ("part", 3, TypeError),
        ("model", None, TypeError),
        ("optimizer", None, TypeError),
        ("part", None, TypeError),
    ],
)
def test_rejects_a_wrong_argument(name, value, error, tmp_path):
    run = training()
    arguments = {"model": run.model, "optimizer": run.optimizer, name: value}
    with pytest.raises(error, match=f"^{name} must be .*; pass"):
        vbs.Checkpoint(tmp_path, **arguments)
    assert updates(tmp_path) == []


# ------------------------------------------------------------------------------------------------------- real processes


def save_and_restore(backend, folder):
    run = training(backend=backend).run(3)
    torch.manual_seed(backend.world.rank)
    with checkpoint(folder, run) as saves:
        saves.save()
        expected = torch.rand(())
        run.run(1)
        assert saves.restore()
        assert torch.rand(()) == expected
        assert run.optimizer.updates == 3
        run.run(2)
    return run.weights()


def test_processes_save_and_restore(tmp_path):
    for weights in run_job("gloo", save_and_restore, tmp_path, ranks=2):
        assert_equal(weights, training().run(5).weights())


@pytest.mark.slow("starts XLA twice")
@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")
def test_cores_save_without_compiling_and_another_number_resumes(tmp_path):
    case = XlaCase(vbs.AdaScaleOptimizer, SIZES, 4)
    (compiled, weights), _ = run_job("cores", save, tmp_path, case, STOP, ranks=2)
    ((restored, updates, resumed),) = run_job("cores", restore, tmp_path, case, ranks=1)
    assert compiled == [0] * STOP
    assert (restored, updates) == (True, STOP)
    fixed = {"fixed_shape": True}
    uninterrupted = training(vbs.AdaScaleOptimizer, noise="differenced", sampling=fixed).run(len(SIZES)).weights()
    for found in (weights, resumed):
        assert_equal([weight.numpy() for weight in found], uninterrupted)


def test_a_longer_trace_goes_on(tmp_path):
    run = training(sizes=SIZES[:5], dataset_size=73, sampling={"on_end": "error"}).run(5)
    save_checkpoint(tmp_path, run)
    longer = training(dataset_size=73, sampling={"on_end": "error"})
    told = pytest.warns(UserWarning, match=r"^The batch trace differs from the saved run's trace after update 5")
    with checkpoint(tmp_path, longer) as saves, told:
        assert saves.restore()
    assert longer.optimizer.updates == 5
    assert_equal(longer.weights(), run.weights(), 0)


def test_other_samples_are_refused_unless_strict_is_false(tmp_path):
    run = training().run(3)
    save_checkpoint(tmp_path, run)
    other = training(sizes=(20, 8, 1, 33), sampling={"seed": 1})
    before = other.weights()
    with checkpoint(tmp_path, other) as saves:
        with pytest.raises(
            RuntimeError,
            match=r"but seed was 0 and is 1, the first 3 batch sizes of the trace are not the same; .* strict=False",
        ):
            saves.restore()
        assert other.optimizer.updates == 0
        assert_equal(other.weights(), before, 0)
        assert saves.restore(strict=False)
    assert other.optimizer.updates == 3
    assert_equal(other.weights(), run.weights(), 0)


@pytest.mark.parametrize("inner", [False, True])
def test_a_forgotten_scheduler_warns(inner, tmp_path):
    run = training()
    cosine = CosineAnnealingLR(run.optimizer.inner if inner else run.optimizer, T_max=9)
    with pytest.warns(UserWarning, match=r"^The checkpoint has no scheduler, but .*; pass scheduler=$") as warned:
        vbs.Checkpoint(tmp_path / "a", model=run.model, optimizer=run.optimizer).close()
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(tmp_path / "b", run, scheduler=cosine).close()
        checkpoint(tmp_path / "c", run, under_another_name=cosine).close()
        checkpoint(tmp_path / "d", training()).close()


def test_the_scheduler_inside_a_progress_scheduler_is_refused(tmp_path):
    run = training()
    cosine = CosineAnnealingLR(run.optimizer, T_max=9)
    progress = vbs.ProgressScheduler(cosine, run.optimizer)
    with pytest.raises(ValueError, match=r"got a CosineAnnealingLR that a ProgressScheduler steps; pass the Progress"):
        checkpoint(tmp_path, run, scheduler=cosine)
    checkpoint(tmp_path, run, scheduler=progress).close()
    checkpoint(tmp_path, run, scheduler=progress, cosine=cosine).close()


@pytest.mark.parametrize("compiled", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "how", [torch.compile, nn.DataParallel, lambda model: nn.Sequential(torch.compile(model[0]), *model[1:])]
)
def test_a_model_is_restored_whether_it_was_compiled_or_not(compiled, how, tmp_path):
    run, later = training(), training()
    run.run(1)
    models = [
        how(one.model) if is_compiled else one.model for one, is_compiled in zip((run, later), compiled, strict=True)
    ]
    with vbs.Checkpoint(tmp_path, model=models[0], optimizer=run.optimizer) as saves:
        saves.save()
    with vbs.Checkpoint(tmp_path, model=models[1], optimizer=later.optimizer) as restores:
        assert restores.restore()
    assert_equal(run.weights(), later.weights())
    assert vbs.read_checkpoint(tmp_path)["parts"]["model"].keys() == run.model.state_dict().keys()
