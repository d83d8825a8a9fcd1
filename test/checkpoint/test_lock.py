"""The lock that gives a folder of checkpoints one writer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from helpers.checkpoints import checkpoint, names, start, two_saved
from helpers.reference import training


def test_a_checkpoint_is_not_a_folder_of_checkpoints(tmp_path: Path) -> None:
    folder = two_saved(tmp_path)
    before = names(folder)
    with pytest.raises(RuntimeError, match=r"got the checkpoint .*/update-00000002; pass the folder that it is in"):
        checkpoint(folder / "update-00000002", training())
    assert names(folder) == before
    assert not (folder / "update-00000002" / ".lock").exists()


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    run = training()
    with checkpoint(tmp_path, run):
        with pytest.raises(RuntimeError, match=rf"{tmp_path} is in use by process {os.getpid()} on .*; close\(\) that"):
            checkpoint(tmp_path, run)
        with checkpoint(tmp_path / "other", run):
            pass
    with checkpoint(tmp_path, run):
        pass


@pytest.mark.slow("waits for processes")
def test_a_forked_child_that_exits_does_not_release_the_lock(tmp_path: Path) -> None:
    script = """
import os
run = training()
saves = checkpoint(folder, run)
if os.fork() == 0:
    sys.exit()
os.wait()
try:
    checkpoint(folder, run)
except RuntimeError:
    print("in use")
"""
    out, err = start(script, tmp_path).communicate(timeout=100)
    assert (out, err) == ("in use\n", "")


@pytest.mark.slow("waits for processes")
def test_a_forked_child_that_outlives_the_writer_does_not_hold_the_lock(tmp_path: Path) -> None:
    script = """
import os, time
saves = checkpoint(folder, training())
if os.fork() == 0:
    time.sleep(100)
print("ready", flush=True)
time.sleep(100)
"""
    writer = start(script, tmp_path, new_session=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    writer.kill()
    writer.wait()
    try:
        with checkpoint(tmp_path, training()):
            pass
    finally:
        os.killpg(writer.pid, signal.SIGKILL)
        writer.communicate()


def test_a_closed_checkpoint_does_not_save(tmp_path: Path) -> None:
    run = training().run(1)
    with checkpoint(tmp_path, run) as saves:
        pass
    with pytest.raises(RuntimeError, match=rf"{tmp_path} is not locked by .* closed .*; create another"):
        saves.save()
    assert names(tmp_path) == []
