"""What rank 0 says: which checkpoint was restored, and after an exception which one to resume from."""

from __future__ import annotations

import os
import signal
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, messages, restore_checkpoint, save_checkpoint, start, told, updates
from helpers.reference import SIZES, training
from variable_batch_size.checkpoint import tensor_file
from variable_batch_size.checkpoint.checkpoint import UNCALLED_STEP
from variable_batch_size.testing import run_ranks

RESTORED = f"Checkpoint update-00000002-0001-1-1 restored: update 2, epoch 0, {sum(SIZES[:2])} samples, lost {{}}."
NEWEST = "Checkpoint update-00000002-0001-1-1 is the newest one; {}; restore() resumes from it."


@pytest.mark.slow("starts torchrun")
@pytest.mark.torch
def test_the_other_rank_says_what_to_resume_from_if_a_worker_is_killed(tmp_path):
    script = """
import os, time
import torch.distributed as dist
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
run = training(backend=vbs.backend.DistributedBackend())
with checkpoint(folder / "saved", run, every=2) as saves:
    for _ in range(5):
        run.run(1)
        saves.step()
        if run.optimizer.updates == 3:
            (folder / f"made{rank}").touch()
            while rank == 1 and not (folder / "made0").exists():
                time.sleep(0.01)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
"""
    ranks = [start(script, tmp_path, rank) for rank in range(2)]
    errors = [process.communicate(timeout=100)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, -signal.SIGKILL]
    lines = [line for line in messages(errors[0]) if "Checkpoint" in line]
    assert lines == [NEWEST.format("1 update is lost")], errors[0]
    assert "by peer" in errors[0]  # what gloo says of the connection


@pytest.mark.parametrize("end", ["with", "finally"])
@pytest.mark.parametrize(
    ("made", "line"),
    [
        (0, None),
        (1, "No checkpoint is in {folder}; 1 update is lost, and the training has to begin again."),
        (2, NEWEST.format("no update is lost")),
        (3, NEWEST.format("1 update is lost")),
        (4, NEWEST.format("2 updates are lost")),
    ],
)
def test_an_exception_tells_rank_0_what_to_resume_from(made, line, end, tmp_path, caplog):
    def train(backend):
        run = training(backend=backend)
        saves = checkpoint(tmp_path, run)

        def loop():
            for update in range(1, made + 1):
                run.run(1)
                if update == 2:
                    saves.save(wait=False)
            raise KeyError("stop")

        with pytest.raises(KeyError, match="stop"):  # noqa: PT012
            if end == "with":
                with saves:
                    loop()
            try:
                loop()
            finally:
                saves.close()
                saves.close()

    run_ranks(train, 2)
    assert told(caplog) == ([line.format(folder=tmp_path)] if line else [])


@pytest.mark.parametrize("error", [SystemExit(143), SystemExit(1), GeneratorExit(), None])
def test_an_end_that_was_asked_for_says_nothing(error, tmp_path, caplog):
    def train():
        with checkpoint(tmp_path, training().run(2)) as saves:
            saves.save()
            if error:
                raise error

    if error:
        with pytest.raises(type(error)):
            train()
    else:
        train()
    assert told(caplog) == []


@pytest.mark.parametrize("by", ["", "preemption", "checkpoint", "both"])
def test_ctrl_c_saves_where_it_is_asked_to_and_tells_what_is_lost_elsewhere(by, tmp_path, caplog):
    signals = (signal.SIGTERM,) if by == "both" else (signal.SIGINT,)
    preemption = vbs.Preemption(signals) if by in ("preemption", "both") else nullcontext()
    run, asked = training(), by != ""
    options = {"on_interrupt": "save"} if by in ("checkpoint", "both") else {}
    expected = pytest.raises(SystemExit if asked else KeyboardInterrupt)
    with expected, preemption, checkpoint(tmp_path, run, **options) as saves:
        for _ in range(1000):
            run.run(1)
            saves.step()
            if run.optimizer.updates == 2:
                saves.save()
            if run.optimizer.updates == 3:
                os.kill(os.getpid(), signal.SIGINT)
    assert (run.optimizer.updates in updates(tmp_path)) == asked
    saved = f"Checkpoint update-{run.optimizer.updates:08d}-0001-2-1 saved"
    of_checkpoint = [line for line in told(caplog) if line.startswith("Checkpoint")]  # the signal's line is a thread's
    assert of_checkpoint[-1].startswith(saved if asked else NEWEST.format("1 update is lost"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_wish_for_ctrl_c_is_refused(tmp_path):
    wrong = "stop"
    with pytest.raises(ValueError, match=r"^on_interrupt must be \"save\" or None, got 'stop'; pass one of these$"):
        checkpoint(tmp_path, training(), on_interrupt=wrong)


def test_only_updates_since_the_restore_are_lost(tmp_path, caplog):
    def save():
        with checkpoint(tmp_path, training().run(2), best="min:loss") as saves:
            saves.report(loss=1)

    def fail(made, after):
        run = training()
        with pytest.raises(KeyError), checkpoint(tmp_path, run) as saves:  # noqa: PT012
            after(saves)
            run.run(made)
            raise KeyError
        return told(caplog)

    save()
    assert fail(0, lambda saves: saves.restore()) == [RESTORED.format("0 updates")]
    assert fail(3, lambda saves: saves.restore()) == [RESTORED.format("0 updates"), NEWEST.format("3 updates are lost")]
    assert fail(0, lambda saves: saves.restore()) == [RESTORED.format("3 updates")]
    assert fail(1, lambda saves: saves.latest) == []  # the folder is that of another training
    assert fail(1, lambda saves: saves.restore(best=True)) == [
        RESTORED.format("0 updates"),
        "Checkpoint update-00000002-0001-1-1 is the best one; 1 update is lost; restore(best=True) resumes from it.",
    ]


def test_what_cannot_be_written_is_not_named(tmp_path, caplog, monkeypatch):
    run = training()
    saves = checkpoint(tmp_path, run)
    run.run(2)
    saves.save()
    run.run(1)
    monkeypatch.setattr(tensor_file, "write", lambda *_: (tmp_path / "missing").unlink())
    saves.save(wait=False)
    with pytest.warns(RuntimeWarning, match="update-00000003 could not be written"), pytest.raises(KeyError), saves:
        raise KeyError
    assert told(caplog) == [NEWEST.format("1 update is lost")]


def test_rank_0_says_once_what_was_restored(tmp_path, caplog):
    save_checkpoint(tmp_path, training().run(2))

    def restore(backend):
        restore_checkpoint(tmp_path, training(backend=backend))

    run_ranks(restore, 3)
    assert told(caplog) == [RESTORED.format("0 updates").replace("update 2,", "world 1 -> 3, update 2,")]


def test_rank_0_says_once_that_there_is_nothing_to_restore(tmp_path, monkeypatch, caplog):
    def restore(backend):
        with checkpoint(Path("runs"), training(backend=backend)) as saves:
            assert not saves.restore()
            assert not saves.restore(best=True)

    monkeypatch.chdir(tmp_path)  # a relative path often is one of another working directory
    run_ranks(restore, 2)
    assert told(caplog) == [
        f"No checkpoint in {tmp_path}/runs: nothing is restored.",
        f"No checkpoint with a reported value in {tmp_path}/runs: nothing is restored.",
    ]


@pytest.mark.parametrize("every", [1, timedelta(hours=1), None])
@pytest.mark.parametrize("steps", [0, 1])
def test_an_interval_without_step_is_told(every, steps, tmp_path):
    def train(backend):
        run = training(backend=backend)
        with checkpoint(tmp_path, run, every=every) as saves:
            run.run(2)
            for _ in range(steps):
                saves.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(train, 2)
    assert [str(warning.message) for warning in caught] == [UNCALLED_STEP] * (every is not None and not steps)


def test_saves_of_the_loop_need_no_step(tmp_path):
    save_checkpoint(tmp_path, training().run(2), every=1)


@pytest.mark.parametrize(
    ("ends", "until"),
    [({"epochs": 1}, {}), ({"max_updates": 3}, {}), ({}, {"until": 1}), ({}, {"until": 2, "by": "updates"})],
)
def test_a_training_that_has_ended_says_so_when_it_is_started_again(tmp_path, caplog, ends, until):
    """By the loop, which knows where it ends; and not where something is left of it."""

    def train(more=False):
        run = training(sampling={} if more else ends)
        end = {"until": 3} if more else until
        with checkpoint(tmp_path, run) as saves:
            saves.restore()
            made = run.optimizer.updates
            for _ in vbs.remaining_epochs(run.sampler, run.optimizer, **end):
                for update in vbs.updates(run.sampler, run.optimizer):
                    for indices in update:
                        run.step(indices)
            saves.save()
        return run.optimizer.updates - made

    assert train() > 0
    ended = (
        f"The training has ended after {training_updates(tmp_path)} updates; to train it again, pass another folder."
    )
    assert ended not in told(caplog)
    assert train() == 0
    assert ended in told(caplog)
    caplog.clear()
    assert train(more=True) > 0
    assert ended not in told(caplog)


def training_updates(folder):
    return updates(folder)[0]
