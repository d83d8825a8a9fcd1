"""The best checkpoint stays beside the newest ones, through restores and deaths at any moment."""

from __future__ import annotations

import errno
import json
import math
import shutil
import tempfile
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import StepLR

from helpers.checkpoints import STATE, checkpoint, names, path_of, save_checkpoint, told, truncate_state, updates
from helpers.properties import examples
from helpers.reference import training
from helpers.sudden_death import Died, dying_after
from variable_batch_size.checkpoint import tensor_file
from variable_batch_size.checkpoint.contents import MANIFEST
from variable_batch_size.checkpoint.storage import Storage
from variable_batch_size.testing import run_ranks

LOSS = "min:loss"


def facts(path):
    assert path is not None
    return json.loads((Path(path) / MANIFEST).read_text())


def reported(folder, values, **options):
    """Report a value after each update."""
    run = training()
    with checkpoint(folder, run, best=LOSS, **options) as saves:
        for value in values:
            run.run(1)
            saves.report(loss=value)
    return run


# ------------------------------------------------------------------------------------------------- what is kept


def test_a_checkpoint_of_the_same_update_is_marked_instead_of_written_again(tmp_path):
    run = training()
    with checkpoint(tmp_path, run, best=LOSS, every=2, keep=2) as saves:
        run.run(1)
        assert not saves.step()
        run.run(1)
        assert saves.step()  # in a thread
        assert saves.report(loss=0.5)
        state = path_of(tmp_path, 2) / STATE
        written = state.stat().st_mtime_ns
        assert saves.best == str(path_of(tmp_path, 2))
        assert not saves.report(loss=0.5)
        assert saves.report(loss=0.25)
        assert state.stat().st_mtime_ns == written
        assert updates(tmp_path) == [2]
        assert facts(saves.best)["metrics"] == {"loss": 0.25}


def test_the_best_one_stays_without_a_criterion_and_beside_that_of_another_one(tmp_path):
    run = reported(tmp_path, [0.5, 0.25, 0.75])
    with checkpoint(tmp_path, run, keep=1) as saves:
        for _ in range(2):
            run.run(1)
            saves.save()
        assert updates(tmp_path) == [2, 5]
        assert saves.best == str(path_of(tmp_path, 2))
        with pytest.raises(
            RuntimeError, match=r"^report\(\) was called on a Checkpoint that has no .*; pass for .* to it"
        ):
            saves.report(loss=0.1)
    with checkpoint(tmp_path, run, keep=1, best="max:accuracy") as saves:
        assert saves.best is None
        assert not saves.restore(best=True)
        assert saves.report(accuracy=0.5, loss=0.7)
        run.run(1)
        saves.save()
    assert updates(tmp_path) == [2, 5, 6]


@examples(20)
@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, math.nan]), min_size=1, max_size=6),
    saved=st.lists(st.sampled_from(["", "save", "background"]), min_size=6, max_size=6),
    keep=st.integers(1, 3),
    world=st.integers(1, 2),
)
def test_the_kept_ones_are_the_best_and_the_newest(values, saved, keep, world):
    def train(folder, backend):
        run, best, made, others = training(backend=backend), math.inf, set[int](), set[int]()
        with checkpoint(folder, run, best=LOSS, keep=keep) as saves:
            for update, (value, how) in enumerate(zip(values, saved, strict=False), 1):
                run.run(1)
                if how:
                    saves.save(wait=how == "save")
                    made.add(update)
                value = value if backend.world.rank == 0 else -1.0  # rank 0's counts
                own = saves.report(loss=value)
                if backend.world.rank == 0:
                    assert own == (value < best)
                if own:
                    made.add(update)
                    others = {update}
                    best = value
        newest = set(sorted(made)[-keep:])
        return sorted(newest | others)

    with tempfile.TemporaryDirectory() as folder:
        for expected in run_ranks(lambda backend: train(Path(folder), backend), world):
            assert updates(Path(folder)) == expected


# ------------------------------------------------------------------------------------------ deaths between operations


@examples(30)
@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=6),
    deaths=st.lists(st.integers(0, 90), max_size=4),
    every=st.sampled_from([None, 1, 2]),
    keep=st.integers(1, 3),
)
def test_there_is_an_intact_best_one_at_every_moment(values, deaths, every, keep):
    """The training evaluates after each update; a death leaves at least the best value of the completed reports."""
    with tempfile.TemporaryDirectory() as name:
        folder, completed, under_way = Path(name), math.inf, math.inf

        def attempt():
            nonlocal completed, under_way
            run = training()
            saves = checkpoint(folder, run, best=LOSS, keep=keep, every=every)
            try:
                saves.restore()
                for update in range(run.optimizer.updates, len(values) + 1):
                    if update > run.optimizer.updates:
                        run.run(1)
                        saves.step()
                    if update:
                        under_way = min(completed, values[update - 1])
                        saves.report(loss=values[update - 1])
                        saves._saver.finish_pending("test")
                        completed = under_way
                saves.close()
            finally:
                with suppress(Died, RuntimeError, OSError):
                    saves._saver.thread.wait()
                saves._folder.writer._stop()  # as the end of a process does

        for operations in (*deaths, math.inf):
            with dying_after(int(min(operations, 10**9))):
                attempt()
            with checkpoint(folder, training(), best=LOSS) as reader:
                if reader.best is None:
                    assert completed == math.inf
                else:
                    assert facts(reader.best)["metrics"]["loss"] in (completed, under_way)
        assert completed == min(values)
        run = training()
        with checkpoint(folder, run) as saves:
            assert saves.restore()
            assert run.optimizer.updates <= len(values)
            saves.save()
        assert all(path.startswith("update-") for path in names(folder))  # no leftover


# ------------------------------------------------------------------------------------------------------- restoring it


@pytest.mark.parametrize("file", [STATE, MANIFEST])
def test_a_damaged_best_one_is_skipped_with_a_warning(file, tmp_path):
    reported(tmp_path, [0.5, 0.25])
    run = training()
    with checkpoint(tmp_path, run, best=LOSS) as saves:
        (path_of(tmp_path, 2) / file).write_bytes(b"damaged")
        with pytest.warns(
            RuntimeWarning, match=r"Damaged .*: update-00000002-.*; restoring update-00000001-0001-1-1 inst"
        ):
            assert saves.restore(best=True)
        assert saves.best == str(path_of(tmp_path, 1))
        truncate_state(path_of(tmp_path, 1))
        expected = (
            r"no checkpoint with a reported value .* read: update-00000002\S+ \(.*\), update-00000001\S+ \(checksum "
        )
        with pytest.raises(RuntimeError, match=expected + r".*\); restore\(\) takes the newest one"):
            saves.restore(best=True)


def test_a_host_without_memory_is_no_damage(tmp_path, monkeypatch):
    reported(tmp_path, [1.0, 2.0], keep=1)

    class NoMemory:
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *_, **__):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 32 bytes.")

    run = training()
    with checkpoint(tmp_path, run, best=LOSS, keep=1) as saves:
        with monkeypatch.context() as patch:
            patch.setattr(tensor_file, "torch", NoMemory())
            with pytest.raises(
                RuntimeError, match=r"bytes for a tensor of a checkpoint cannot be allocated; free host"
            ):
                saves.restore()
        assert saves.restore()
        run.run(1)
        with monkeypatch.context() as patch:
            patch.setattr(tensor_file, "torch", NoMemory())
            saves._folder._intact.clear()
            saves.save()
        assert "update-00000001" in str(saves.best)
    assert updates(tmp_path) == [1, 2]


@pytest.mark.parametrize("world", [1, 2])
def test_a_training_that_continues_from_the_best_one_replaces_the_newer_ones(world, tmp_path, caplog):
    save_checkpoint(tmp_path, reported(tmp_path, [0.5, 0.25, 0.75]).run(1))
    assert updates(tmp_path) == [2, 4]

    def resume(backend):
        run = training(backend=backend)
        with checkpoint(tmp_path, run, best=LOSS, keep=3) as saves:
            assert saves.restore(best=True)
            assert updates(tmp_path) == [2, 4]  # an evaluation deletes nothing
            run.run(1)
            assert not saves.report(loss=0.3)
            backend._gather_bytes(b"")
            assert updates(tmp_path) == [2, 4]
            run.run(1)
            assert saves.report(loss=0.2)  # of update 4, and not that of the other branch
        assert updates(tmp_path) == [2, 4]
        assert saves.best == str(path_of(tmp_path, 4))

    run_ranks(resume, world)
    (line,) = told(caplog)
    deleted = "the next save deletes update-00000004-0002-1-1."
    assert line.endswith(f"epoch 0, {sum((20, 7))} samples, lost 2 updates; {deleted}")
    assert facts(path_of(tmp_path, 4))["metrics"] == {"loss": 0.2}


@pytest.mark.parametrize("saves_before", [False, True])
def test_an_end_of_an_epoch_that_was_reported_is_done_once(saves_before, tmp_path):
    """`report` is called last; with and without a checkpoint that `step` has saved at that end."""
    sizes, epochs = (7, 3, 10), 3

    def train(stop):
        run = training(sizes=sizes, dataset_size=20, sampling={"on_end": "cycle"})
        scheduler, lines = StepLR(run.optimizer, 1, gamma=0.5), []
        with checkpoint(tmp_path, run, scheduler=scheduler, best=LOSS, every=1 if saves_before else None) as saves:
            saves.restore()
            for epoch in range(run.optimizer.epoch, epochs):
                run.sampler.set_epoch(epoch)
                run.optimizer.set_epoch(epoch)
                for rows in run.sampler:
                    run.loss(rows).backward()
                    run.optimizer.step()
                    saves.step()
                scheduler.step()
                saves.report(loss=-epoch)
                lines.append((epoch, run.optimizer.param_groups[0]["lr"]))
                if epoch == stop:
                    break
        return lines

    before, after = train(stop=0), train(stop=2)
    again = [before[0]] if saves_before else []  # what step() saved resumes before the evaluation
    lr = 0.02
    assert before + after == [(0, lr / 2), *again, (1, lr / 4), (2, lr / 8)]


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("text", ["loss", "min", "min:", "best:loss", ":loss", ""])
def test_rejects_a_wrong_criterion(text, tmp_path):
    with pytest.raises(ValueError, match=rf'^best must be "min:" or "max:" and the name .*, got {text!r}; pass for'):
        checkpoint(tmp_path / "saved", training(), best=text)
    assert updates(tmp_path) == []


def test_a_part_cannot_be_called_best(tmp_path):
    with pytest.raises(TypeError, match=r"^best must be .* \(Linear\); pass for example .* under another name$"):
        checkpoint(tmp_path, training(), best=torch.nn.Linear(1, 1))


def test_rejects_wrong_reports(tmp_path):
    run = training(minibatch_size=2)
    with checkpoint(tmp_path, run, best=LOSS) as saves:
        with pytest.raises(ValueError, match=r'report\(\) must get loss, by which best="min:loss", got accuracy; pass'):
            saves.report(accuracy=1.0)
        wrong = ["0.5", None, True, 1j, torch.zeros(2), torch.tensor(True), [1.0]]
        for value in wrong:
            with pytest.raises(TypeError, match=r"^loss must be a number or a tensor with one, got .*; pass its value"):
                saves.report(loss=value)
        next(run.steps())
        with pytest.raises(
            RuntimeError, match=r"^report\(\) was called within an accumulation; call it after the last"
        ):
            saves.report(loss=1.0)
    assert updates(tmp_path) == []


def no_space(*_):
    raise OSError(28, "No space left on device")


def test_a_full_disk_raises_on_every_rank_and_changes_nothing(tmp_path):
    def train(backend):
        run = training(backend=backend).run(1)
        with checkpoint(tmp_path, run, best=LOSS) as saves:
            saves.save()
            if backend.world.rank == 0:
                saves._folder.mark_best = no_space
            with pytest.raises(RuntimeError, match=r"update-00000001 could not be written to .* \(No space left"):
                saves.report(loss=1.0)
            assert saves.best is None
        return "ok"

    assert run_ranks(train, 2) == ["ok", "ok"]


@pytest.mark.parametrize(
    "value", [1, 1.0, np.float32(1), np.int64(1), torch.tensor(1.0), torch.ones(1, requires_grad=True)]
)
def test_accepts_any_number_from_rank_0_and_nothing_from_others(value, tmp_path):
    def train(backend):
        with checkpoint(tmp_path, training(backend=backend).run(1), best=LOSS) as saves:
            return saves.report(loss=value if backend.world.rank == 0 else None)

    assert run_ranks(train, 2) == [True, True]
    assert facts(path_of(tmp_path, 1))["metrics"] == {"loss": 1.0}


@pytest.mark.parametrize("what", ["the JSON of a rank", "its folder"])
def test_the_best_checkpoint_that_was_deleted_by_hand_is_told(what, tmp_path):
    """Until a save has followed it; one that a better one has replaced is not missed."""
    run = reported(tmp_path, [0.5, 0.2, 0.1, 0.9], keep=1)
    with checkpoint(tmp_path, run, best=LOSS, keep=1) as saves:
        saves.save()
    path = path_of(tmp_path, 3)
    (path / MANIFEST).unlink() if "JSON" in what else shutil.rmtree(path)
    missing = rf"{path.name} \({what} is missing\)"
    for _ in range(2):
        with checkpoint(tmp_path, training(), best=LOSS) as saves, pytest.warns(RuntimeWarning, match=missing):
            assert not saves.restore(best=True)
    with checkpoint(tmp_path, again := training(), best=LOSS) as saves, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert saves.restore()
        again.run(1)
        saves.save()
        assert not saves.restore(best=True)


def test_a_first_save_after_a_restore_of_the_best_one_that_fails_deletes_nothing(tmp_path, monkeypatch):
    run = reported(tmp_path, [0.1, 0.5, 0.9], keep=3)
    with checkpoint(tmp_path, run, best=LOSS, keep=3) as saves:
        for _ in range(2):
            run.run(1)
            saves.save()
    before, create, again = names(tmp_path), Storage.create, training()

    def full(storage, *names, **options):
        if names[-1].startswith("rank-0.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(storage, *names, **options)

    with checkpoint(tmp_path, again, best=LOSS, keep=3) as saves:
        assert saves.restore(best=True)
        again.run(1)
        for wait in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(Storage, "create", full)
                told = pytest.raises(RuntimeError, match="earlier checkpoints are unchanged")
                with told if wait else nullcontext():
                    saves.save(wait=wait)
                with nullcontext() if wait else told:
                    saves._saver.finish_pending("test")
            assert {*before} <= {*names(tmp_path)}
        saves.save()
        assert updates(tmp_path) == [1, 2]
        assert saves.best == str(path_of(tmp_path, 1))
