"""Trainings go on from a checkpoint as the training that has saved it, until a seed changes the next epoch."""

from __future__ import annotations

import shutil
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.evaluation_tasks import SIZE, Tiny, brought
from variable_batch_size.adaptive import Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.evaluation import Experiment, ModelTime, UnderCapacity, run
from variable_batch_size.lab.evaluation.experiment import check_cells
from variable_batch_size.lab.evaluation.records import REFERENCE
from variable_batch_size.lab.evaluation.training import train

pytestmark = pytest.mark.filterwarnings("ignore:trace .*the batch size is")
TINY = "helpers.evaluation_tasks:Tiny"
SAMPLES, SEED, LR = 480, 3, 0.05
LOSS = Tiny.loss


def saved(folder, updates=14, by="samples", model=None, more=None, **options):
    """Train the task as a user would, save after so many updates, and return the weights at the end of the epoch."""
    arguments = {"rule": "linear", "ref_batchsize": 8} | options
    task, trace = Tiny(), "0:8 10:16"
    model = task.model(SEED) if model is None else model
    dataset = task.dataset()
    sampler = vbs.CustomSampler(dataset, trace, 1, 0, 4, SEED, fixed_shape=False, max_samples=SAMPLES)
    optimizer = vbs.CustomOptimizer(task.optimizer(model, LR), sampler, max_grad_norm=5.0, **arguments)
    schedule = LambdaLR(optimizer, lambda step: task.schedule(step * 8, SAMPLES))
    parts = {"model": model, "optimizer": optimizer} | ({} if more is None else {"more": more})
    if by is not None:
        parts["scheduler"] = vbs.ProgressScheduler(schedule, optimizer, by=by)
    with vbs.Checkpoint(folder, **parts) as checkpoint:
        for epoch in vbs.remaining_epochs(sampler, optimizer):
            for batch in DataLoader(dataset, batch_size=None, sampler=sampler, collate_fn=tuple):
                task.loss(model, batch).backward()
                if optimizer.step() and by is not None:
                    parts["scheduler"].step()
                if optimizer.updates == updates and not optimizer.inside_step:
                    checkpoint.save()
            if epoch == 1:
                break
    return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()


def cells(folder, **other):
    arguments = {"tasks": [TINY], "traces": ["16"], "rules": ["linear", "root", "adascale"], "seeds": 2}
    arguments["between"] = 16
    return Experiment(**arguments | {"samples": SAMPLES, "start": folder} | other).cells()


def of(wanted, rule, seed=0, trace="16", factor=1.0):
    kind = (rule, seed, trace, factor)
    return next(cell for cell in wanted if (cell.rule, cell.seed, cell.trace, cell.lr_factor) == kind)


def test_another_checkpoint_of_the_same_name_needs_another_folder(tmp_path):
    folder, options = tmp_path / "start", {"rules": ["linear"], "seeds": 1}
    saved(folder)
    run(cells(folder, **options), tmp_path / "run", progress=False)
    shutil.rmtree(folder)
    saved(folder, model=Tiny().model(SEED + 1))
    with pytest.raises(ValueError, match=r"must have one checkpoint for each name of a trace, got several for '16'"):
        run(cells(folder, **options), tmp_path / "run", progress=False)


def test_the_epoch_that_has_begun_is_that_of_the_training(tmp_path, monkeypatch):
    """Its order, dropout, momentum and schedule, to the last bit: other objects, and another trace with equal sizes."""
    weights, found = saved(tmp_path), list[list[float]]()

    class Watched(Tiny):
        def evaluate(self, model):
            found.append(torch.cat([one.detach().flatten() for one in model.parameters()]).tolist())
            return super().evaluate(model)

    module = ModuleType("watched_task")
    module.task = Watched()
    monkeypatch.setitem(sys.modules, "watched_task", module)
    line = train(of(cells(tmp_path, tasks=["watched_task:task"]), "linear"))
    assert line["curve"]["samples"][:4] == [144, 160, 176, 192]
    assert line["curve"]["updates"][:4] == [14, 15, 16, 17]
    assert found[line["curve"]["samples"].index(2 * SIZE) + 1] == weights  # the first one is of the untrained model
    assert (
        line["untrained"] == pytest.approx(Tiny().evaluate(Tiny().model(0).eval())["loss"]) != line["curve"]["loss"][0]
    )


def test_a_seed_changes_the_next_epoch_and_nothing_before(tmp_path):
    saved(tmp_path)
    wanted = cells(tmp_path)
    first, second, again = (train(of(wanted, "root", seed))["curve"] for seed in (0, 1, 0))
    until = first["samples"].index(2 * SIZE) + 1
    assert first["loss"][:until] == second["loss"][:until]
    assert all(one != other for one, other in zip(first["loss"][until:], second["loss"][until:], strict=True))
    assert first == again


def test_every_sample_of_a_later_epoch_is_used_once(tmp_path, monkeypatch):
    saved(tmp_path)
    cell = of(cells(tmp_path), "root", seed=1)
    rows = list[Tensor]()
    monkeypatch.setattr(Tiny, "loss", lambda self, model, batch: rows.append(batch[0]) or loss(self, model, batch))
    loss = LOSS
    train(cell)
    inputs = torch.cat(rows)
    assert len(inputs) == SAMPLES - 144
    for epoch in (inputs[48:144], inputs[144:240]):  # 48 are left of the second one
        assert torch.equal(epoch.sum(1).sort().values, Tiny().inputs[:SIZE].sum(1).sort().values)
    assert not torch.equal(inputs[48:144], inputs[144:240])


def test_the_schedule_ends_with_the_task_and_the_factor_multiplies_it(tmp_path):
    saved(tmp_path)
    wanted = cells(tmp_path, lr_factors=[1, 2])
    for factor in (1.0, 2.0):
        cell = of(wanted, "constant", factor=factor)
        assert cell.lr == LR * factor
        curve = train(cell)["curve"]
        assert curve["samples"][-1] == SAMPLES
        starts = np.array(curve["samples"][:-1])
        np.testing.assert_allclose(curve["lr"][1:], factor * LR * (1 - 0.9 * starts / SAMPLES))


@pytest.mark.parametrize("every", [2, 7])
def test_a_training_that_is_stopped_goes_on(every, tmp_path, monkeypatch):
    saved(tmp_path / "start")
    cell = of(cells(tmp_path / "start", lr_factors=[2]), "adascale" if every == 2 else "linear", factor=2.0)
    expected = train(cell)["curve"]

    class StoppedError(Exception):
        pass

    for microbatches in (3, 9, 40):
        left = iter(range(microbatches))

        def stop(self, model, batch, left=left):
            if next(left, None) is None:
                raise StoppedError
            return LOSS(self, model, batch)

        monkeypatch.setattr(Tiny, "loss", stop)
        with pytest.raises(RuntimeError, match="StoppedError"):
            train(cell, tmp_path / "checkpoints", save_every=every)
    monkeypatch.undo()
    assert train(cell, tmp_path / "checkpoints", save_every=every)["curve"] == expected


def test_the_trace_and_its_time_begin_at_the_checkpoint(tmp_path):
    saved(tmp_path)
    path, time = tmp_path / "trace.csv", ModelTime(Throughput.simple(samples_per_second=10))
    path.write_text("step,batch_size\n" + "".join(f"{step},{8 + 8 * (step % 3)}\n" for step in range(21)))
    log = UnderCapacity(CapacityTrace([0, 9.5], [1, 2], 200), "per-device:8", Throughput.simple(10))
    traces = {"a": "0:12 4:24", "b": str(path), "c": log, "d": "noise-scale:1", "e": [8, 16, 24]}
    traces["e"] = vbs.BatchTrace.from_sizes([8, 16, 24], on_end="cycle")
    wanted = cells(tmp_path, traces=traces, time=time, between=1, seeds=1)
    sizes = {name: train(of(wanted, "constant", trace=name))["curve"] for name in traces}
    assert sizes["a"]["batch_size"][1:] == [12] * 4 + [24] * 12  # epochs end at 192, 288, 384 and 480
    assert sizes["b"]["batch_size"][1:4] == [8, 16, 24]
    assert sizes["b"]["batch_size"] == sizes["e"]["batch_size"]
    assert sizes["c"]["batch_size"][1:12] == [8] * 11
    assert sizes["c"]["batch_size"][-2] == 16
    assert sizes["d"]["batch_size"][1] == 8
    for curve in sizes.values():
        assert (curve["samples"][0], curve["samples"][-1], curve["seconds"][0]) == (144, SAMPLES, 0)
        assert curve["seconds"][1] == pytest.approx(curve["batch_size"][1] / 10)


def test_the_whole_evaluation(tmp_path):
    saved(tmp_path / "run", noise="microbatches")
    arguments = {"seeds": 1, "rules": ["linear", "adascale"]}
    found = run(cells(tmp_path / "run", **arguments), tmp_path / "runs", progress=False)
    rows = found.trainings
    assert set(rows["start"]) == {"run, 14 updates"}
    assert rows["trace"].tolist() == ["16"] * 3 + [REFERENCE] * 3
    assert rows["environment"][0]["noise averages"] == "those of the checkpoint"
    assert brought(run(cells(tmp_path / "run", **arguments), tmp_path / "runs", progress=False)) == brought(found)
    assert not {cell.key for cell in cells(tmp_path / "run")} & {
        cell.key for cell in Experiment([TINY], ["16"], ["linear"], samples=SAMPLES, between=16).cells()
    }


@pytest.mark.parametrize(
    ("options", "other", "message"),
    [
        ({"by": None}, {}, r"runs can continue from a checkpoint with model, optimizer, scheduler, a Progress.*, "
         r"got no scheduler, .* in .*; save them with vbs.Checkpoint"),
        ({"by": "updates"}, {}, r"got no scheduler, a ProgressScheduler\(by=\"samples\"\)"),
        ({}, {"samples": 144}, r"must lie before the end of a run, got 144 of 144; pass an earlier one"),
        ({}, {"samples": 192}, r"seeds change runs from the next epoch on, but .* has begun the last one, got 2"),
        ({}, {"lr": 0.1}, r"lr and ref_batchsize must match the checkpoint in .*; leave them out"),
        ({}, {"samples": 960}, r"the schedule of the task must be that of .*, got lr 0.0365 in it, and 0.043"),
        ({}, {"traces": [[8] * 20]}, r"the trace must last for the 336 samples that follow the checkpoint, got 160;"),
        ({}, {"tasks": [TINY, "mnist-cnn"]}, r"must have one task and equal samples, got 2 tasks"),
        ({}, {"ends": ["progress"]}, r"must have one task and equal samples, got 1 tasks and the ends progress"),
        ({"model": nn.Linear(6, 1)}, {}, r"RuntimeError: .*is of another model"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The checkpoint has no scheduler")
def test_what_does_not_fit_is_told(options, other, message, tmp_path):
    saved(tmp_path, **options)
    if "traces" in other:
        other = {"traces": {"short": vbs.BatchTrace.from_sizes(*other["traces"])}}
    with pytest.raises((ValueError, RuntimeError), match=message):
        check_cells(cells(tmp_path, **other))


def test_a_checkpoint_that_is_gone_is_told(tmp_path):
    saved(tmp_path)
    cell = of(cells(tmp_path), "root")
    shutil.rmtree(tmp_path)
    with pytest.raises(RuntimeError, match=r"the checkpoint .* must stay until all runs have ended, but it is"):
        train(cell)


def test_parts_that_no_training_has_are_left_out(tmp_path):
    saved(tmp_path / "run")
    whole = train(of(cells(tmp_path / "run"), "root"))["curve"]
    saved(tmp_path / "other", more=nn.Linear(2, 2))
    assert train(of(cells(tmp_path / "other"), "root"))["curve"] == whole


def test_a_folder_without_a_checkpoint_is_told(tmp_path):
    with pytest.raises(ValueError, match="path must be the folder of a checkpoint or of a run, got "):
        cells(tmp_path / "nothing")
