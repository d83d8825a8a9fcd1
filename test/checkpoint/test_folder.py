"""Checkpoints on real files: damage, full disks, and writers that are killed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from helpers.checkpoints import (
    STATE,
    checkpoint,
    names,
    path_of,
    resealed,
    restore_checkpoint,
    save_checkpoint,
    start,
    truncate_state,
    two_saved,
    updates,
)
from helpers.reference import training
from variable_batch_size.checkpoint.contents import MANIFEST, write_manifest
from variable_batch_size.testing import run_ranks


@pytest.fixture
def saved(tmp_path):
    return two_saved(tmp_path / "saved")


# --------------------------------------------------------------------------------------------------- damage is detected


def without_tensors(path):
    (path / STATE).unlink()


def longer(path):
    with (path / STATE).open("ab") as file:
        file.write(b"\0")


def a_list_as_json(path):
    (path / MANIFEST).write_text("[1, 2]")


def the_json_of_another_one(path):
    for name in (MANIFEST, STATE):  # both are intact, and belong together
        shutil.copy(path_of(path.parent, 1) / name, path / name)
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace("0.02", "0.03", 1))


DAMAGES = [truncate_state, without_tensors, longer, a_list_as_json, the_json_of_another_one]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_restores_the_checkpoint_before_a_damaged_one(damage, saved):
    damage(path_of(saved, 2))
    run = training()
    with checkpoint(saved, run) as saves:
        expected = r"^Damaged checkpoints in .*: update-00000002-0001-2-1 \(.*; restoring update-00000001-\S+ instead$"
        with pytest.warns(RuntimeWarning, match=expected):
            assert saves.restore()
        assert saves.latest == str(path_of(saved, 1))
        assert run.optimizer.updates == 1
        run.run(1)
        saves.save()  # the same update as the damaged one, which it replaces
        assert updates(saved) == [1, 2]


@pytest.mark.parametrize("world", [1, 2])
def test_a_training_does_not_begin_again_because_all_checkpoints_are_damaged(world, saved):
    for name in names(saved):
        truncate_state(saved / name)
    reasons = r"update-00000002\S+ \(checksum mismatch of .*\), update-00000001\S+ \(checksum .*\); copy an intact"

    def train(backend):
        run = training(backend=backend)
        with checkpoint(saved, run) as saves:
            with pytest.raises(RuntimeError, match=rf"^no checkpoint in {saved} can be read: {reasons}"):
                saves.restore()
            assert run.optimizer.updates == 0

    run_ranks(train, world)


def test_a_required_checkpoint_that_is_absent_is_an_error(tmp_path):
    with (
        checkpoint(tmp_path, training()) as saves,
        pytest.raises(RuntimeError, match=rf"^No checkpoint in {tmp_path}: nothing is restored"),
    ):
        saves.restore(required=True)


@pytest.mark.parametrize("what", ["the JSON of a rank", "its folder"])
def test_the_newest_checkpoint_that_was_deleted_by_hand_is_told(what, saved):
    """Until a save has followed it; what a killed save left behind was never told to be there, and is not missed."""
    (saved / "update-00000009-0001-9-2").mkdir()
    name = path_of(saved, 2).name

    def delete(path):
        (path / MANIFEST).unlink() if "JSON" in what else shutil.rmtree(path)

    delete(saved / name)
    for _ in range(2):
        run = training()
        told = rf"^Damaged checkpoints in .*: {name} \({what} is missing\); restoring update-00000001-0001-1-1 instead$"
        with checkpoint(saved, run) as saves, pytest.warns(RuntimeWarning, match=told):
            assert saves.restore()
    with pytest.warns(RuntimeWarning, match=rf"{name} \({what} is missing\); reading .*/update-00000001-0001-1-1$"):
        vbs.read_checkpoint(saved)
    with checkpoint(saved, run, keep=1) as saves:
        run.run(2)
        saves.save()
        saves.restore()
    assert updates(saved) == [3]
    delete(path_of(saved, 3))
    told = r"update-00000003\S+ \(.* is missing\); restoring nothing instead$"
    with checkpoint(saved, training()) as saves, pytest.warns(RuntimeWarning, match=told):
        assert not saves.restore()


def test_a_checkpoint_under_another_name_is_damaged(saved):
    path_of(saved, 2).rename(saved / "update-00000009-0001-9-1")
    with checkpoint(saved, training()) as saves:
        with pytest.warns(
            RuntimeWarning, match=r"update-00000009-0001-9-1 \(checksum mismatch of the JSON of a rank\)"
        ):
            assert saves.restore()
        assert saves.latest == str(path_of(saved, 1))


def test_the_number_of_ranks_in_a_name_costs_nothing(saved):
    """A folder whose name was changed is no checkpoint, as one whose ranks were killed."""
    path_of(saved, 2).rename(saved / f"update-00000002-0001-2-{10**18}")
    assert updates(saved) == [1]


def test_a_training_that_was_pushed_out_leaves_the_records_of_the_other_alone(tmp_path):
    run = training().run(1)
    first = checkpoint(tmp_path, run)
    second = checkpoint(tmp_path, training().run(1))
    second.save()
    before = (tmp_path / "events.jsonl").read_text()
    run.run(1)
    with pytest.raises(RuntimeError, match="was followed by another one"), first:
        first.save()
    assert (tmp_path / "events.jsonl").read_text() == before
    second.close()


def test_a_checkpoint_of_a_later_version_is_named_and_stays(tmp_path):
    saved, earlier = tmp_path, training()
    with checkpoint(saved, earlier) as saves:
        for _ in range(2):
            earlier.run(1)
            saves.save()
    file = path_of(saved, 2) / MANIFEST
    file.write_text(resealed(file.read_text(), 3))
    before, words = (
        names(saved),
        r"must have version 2 of the format vbs-checkpoint, got version 3; install the release",
    )
    with pytest.raises(ValueError, match=words):
        vbs.read_checkpoint(saved)
    with checkpoint(saved, training()) as saves, pytest.raises(RuntimeError, match=words):
        saves.restore()
    with checkpoint(saved, training().run(1)) as saves, pytest.raises(RuntimeError, match=words):  # it may be ahead
        saves.save()
    assert {*before} <= {*names(saved)}
    with checkpoint(saved, earlier, keep=1) as saves:
        for _ in range(3):
            saves.save()
            earlier.run(1)
    assert [int(name.split("-")[1]) for name in names(saved)] == [2, 4]
    assert file.exists()


def test_checkpoints_with_names_of_another_version_are_named_and_stay(tmp_path):
    (tmp_path / "update-00000003").mkdir()
    (tmp_path / "update-00000003" / "checkpoint.json").write_text('{"format": "vbs-checkpoint", "version": 1}')
    told = r"Checkpoint .*/update-00000003 must have version 2 of .*, got the name of another version; continue with"
    with checkpoint(tmp_path, training()) as saves, pytest.raises(RuntimeError, match=told):
        saves.restore()
    with pytest.raises(ValueError, match=told):
        vbs.read_checkpoint(tmp_path)
    assert names(tmp_path) == ["update-00000003"]


class Trap:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["pickle 2", "pickle 4", "torch"])
def test_nothing_in_a_checkpoint_is_executed(form, saved, tmp_path):
    folder, trap, protocol = path_of(saved, 2), tmp_path / "executed", int(form.partition(" ")[2] or 2)
    if form.startswith("pickle"):
        (folder / STATE).write_bytes(pickle.dumps(Trap(trap), protocol=protocol))
        pickle.loads((folder / STATE).read_bytes())
    else:
        torch.save(Trap(trap), tmp_path / "state.pt")
        torch.load(tmp_path / "state.pt", weights_only=False)
        (tmp_path / "state.pt").replace(folder / STATE)
    trap.unlink()  # which is created where it is executed
    contents = (folder / STATE).read_bytes()
    facts = json.loads((folder / MANIFEST).read_text())
    del facts["seal"]
    file = {"bytes": len(contents), "header": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    file["chunks"] = facts["file"]["chunks"]
    (folder / MANIFEST).write_text(write_manifest({**facts, "file": file}))  # else the state is not opened
    run = training()
    with checkpoint(saved, run) as saves, pytest.warns(RuntimeWarning, match="restoring update-00000001-"):
        assert saves.restore()
    assert run.optimizer.updates == 1
    assert not trap.exists()


# ---------------------------------------------------------------------------------------------------- disks and writers


def test_rejects_a_file_as_folder_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    errors = []

    def train(backend):
        with contextlib.suppress(RuntimeError):
            try:
                checkpoint(tmp_path / "file", training(backend=backend))
            except RuntimeError as error:
                errors.append(str(error))
                raise

    run_ranks(train, 2)
    assert len(errors) == 2
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"dir must be a writable folder, got {tmp_path / 'file'} (File exists)")


FULL = (
    "Checkpoint update-{:08d} could not be written to {} (File too large); free disk space, or copy the newest "
    "checkpoint to another folder and continue there "
    "(earlier checkpoints are unchanged)"
)


@pytest.mark.slow("saves at each limit in several processes")
def test_a_save_on_a_full_disk_leaves_nothing_behind(tmp_path):
    script = """
def train(backend):
    run = training(backend=backend).run(1)
    errors = []
    with checkpoint(folder, run, blob=torch.nn.Embedding(300, 301, _weight=torch.zeros(300, 301))) as saves:
        saves.save()
        run.run(1)
        for limit in (1, 200, 5000, 10500, 100_000, 360_000):
            backend._gather_bytes(b"")
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                saves.save()
            except RuntimeError as error:
                errors.append(str(error))
            assert updates(folder) == [1]
        backend._gather_bytes(b"")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        saves.save()
    return errors


errors = run_ranks(train, 2)
print(updates(folder), [len(rank) for rank in errors], *{text for rank in errors for text in rank}, sep="\\n")
"""
    out, err = start(script, tmp_path).communicate(timeout=100)
    listing, numbers, text = out.splitlines()
    assert (listing, numbers, err) == ("[1, 2]", "[6, 6]", "")
    assert text == FULL.format(2, tmp_path)


@pytest.mark.slow("starts processes")
@pytest.mark.torch
def test_no_rank_waits_for_another_while_an_exception_propagates(tmp_path):
    script = """
import warnings


def train(backend):
    run = training(backend=backend).run(1)
    saves = checkpoint(folder, run, blob=torch.nn.Embedding(300, 301, _weight=torch.zeros(300, 301)))
    saves.save(wait=False)
    if backend.world.rank == 0:  # the other rank has returned
        with saves:
            raise KeyError("the training's own")


resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as caught:
    try:
        run_ranks(train, 2)
    except KeyError as error:
        print(*error.args, *(warning.message for warning in caught), sep="\\n")
"""
    out, err = start(script, tmp_path).communicate(timeout=100)
    assert (out.splitlines(), err) == (["the training's own", FULL.format(1, tmp_path)], "")


def test_a_killed_writer_leaves_an_intact_checkpoint(tmp_path):
    script = """
run, waits = training(sizes=[5]), sys.argv[2] == "waits"
with checkpoint(folder, run, every=1, blob=torch.nn.Linear(700, 700)) as saves:
    saves.restore()
    while True:
        run.run(1)
        saves.save() if waits else saves.step()
        print(run.optimizer.updates, flush=True)
"""
    seed = 5
    print("seed", seed)
    rng, reached = random.Random(seed), 0
    for waits in (True, False):
        writer = start(script, tmp_path, "waits" if waits else "continues")
        assert writer.stdout is not None
        for _ in range(3):
            reached = int(writer.stdout.readline())
        with contextlib.suppress(subprocess.TimeoutExpired):
            writer.wait(timeout=rng.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        reached = int((writer.stdout.read().split() or [reached])[-1])
        writer.communicate()
        assert writer.returncode == -signal.SIGKILL
        run = training(sizes=[5])
        restore_checkpoint(tmp_path, run, blob=nn.Linear(700, 700))
        assert reached - (not waits) <= run.optimizer.updates <= reached + 1
    run.run(1)
    save_checkpoint(tmp_path, run, blob=nn.Linear(700, 700))
    assert len(names(tmp_path)) == len(updates(tmp_path))


def test_leftovers_of_a_killed_writer_are_ignored_and_deleted_and_files_of_others_stay(saved):
    left = saved / "update-00000003-0001-3-2"
    shutil.copytree(path_of(saved, 2), left)  # of which rank 1 has not written
    (saved / "update-00000007-0001-9-1").mkdir()
    others = ["update-00000009", "update-notes.txt", "best.pt", "update-00000001-0001-1-1/notes.txt", "rank-0.json.txt"]
    for name in others:
        (saved / name).write_text("of the user")
    run = training()
    with checkpoint(saved, run, keep=1) as saves:
        assert saves.restore()
        assert run.optimizer.updates == 2
        run.run(1)
        saves.save()
    assert updates(saved) == [3]
    assert len(names(saved)) == 2 + len(others) - 1
    assert all((saved / name).read_text() == "of the user" for name in others)


def test_rejects_different_folders_on_different_ranks(tmp_path):
    def save(backend):
        save_checkpoint(tmp_path / "0", training(backend=backend).run(1))

    def restore(backend):
        run = training(backend=backend)
        with checkpoint(tmp_path / str(backend.world.rank), run) as saves:
            saves.restore()

    run_ranks(save, 2)
    with pytest.raises(RuntimeError, match=r"update-00000001\S+ on rank 1 differs from the one on rank 0"):
        run_ranks(restore, 2)
