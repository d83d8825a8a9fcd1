"""Who may write into a folder of checkpoints."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from helpers.checkpoints import checkpoint, names, start
from helpers.reference import training


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    run = training()
    with checkpoint(tmp_path, run):
        with pytest.raises(RuntimeError, match=rf"{tmp_path} is in use by process {os.getpid()} on .*; close\(\) that"):
            checkpoint(tmp_path, run)
        with checkpoint(tmp_path / "other", run):
            pass
    with checkpoint(tmp_path, run):
        pass


def test_a_forked_child_that_ends_leaves_the_folder_its_writer(tmp_path: Path) -> None:
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
    print("refused")
"""
    out, err = start(script, tmp_path).communicate(timeout=100)
    assert (out, err) == ("refused\n", "")


def test_a_forked_child_that_outlives_the_writer_does_not_keep_the_folder(tmp_path: Path) -> None:
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


def test_who_has_closed_a_folder_does_not_write_there(tmp_path: Path) -> None:
    run = training().run(1)
    with checkpoint(tmp_path, run) as saves:
        pass
    with pytest.raises(RuntimeError, match=r"this writer has let .* go; make another Checkpoint"):
        saves.save()
    assert names(tmp_path) == []
