"""The lock that gives a folder of checkpoints one writer."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, names, start, two_saved
from helpers.reference import assert_equal, training
from helpers.sharded import always_sharded, wide
from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint import lease, tensor_file
from variable_batch_size.checkpoint.manifest import file_name
from variable_batch_size.testing import run_ranks

__all__ = ["always_sharded"]


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
    print("ready", flush=True)  # after the child has closed its copy of the lock
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


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all file systems be ones without locks, as some network file systems are."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_folder_without_locks_has_one_writer(tmp_path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = checkpoint(tmp_path, training(), run="a")
    with pytest.raises(RuntimeError, match=rf"in use by process {os.getpid()} on .*; close\(\) that .* wait for \d+ s"):
        checkpoint(tmp_path, training())
    first.close()
    ended = checkpoint(tmp_path, training())
    with pytest.raises(RuntimeError, match="in use"):
        checkpoint(tmp_path, training(), run="b")
    clock = time.time()
    monkeypatch.setattr(lease.time, "time", lambda: clock + lease.SECONDS + 1)
    with checkpoint(tmp_path, training(), run="b"):
        pass
    with pytest.raises(RuntimeError, match="was taken over by"):
        ended.save()
    ended.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_writer_without_locks_that_was_replaced_publishes_nothing(
    late: bool, tmp_path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was replaced while it wrote."""
    stale, run = training(), training()
    old, new = checkpoint(tmp_path, stale, run="job"), list[vbs.Checkpoint]()
    stale.run(1)
    old.save()
    stale.run(1)
    write = tensor_file.write

    def replace_and_write(*arguments: Any) -> Any:
        monkeypatch.setattr(tensor_file, "write", write)
        new.append(checkpoint(tmp_path, run, run="job"))
        return write(*arguments)

    if late:
        monkeypatch.setattr(tensor_file, "write", replace_and_write)
    else:
        new.append(checkpoint(tmp_path, run, run="job"))
    with pytest.raises(RuntimeError, match="was taken over by process"):
        old.save()
    assert new[0].restore()
    run.run(1)
    new[0].save()
    new[0].close()
    assert [path.name for path in sorted(tmp_path.glob("*update*"))] == ["update-00000001", "update-00000002"]
    assert_equal(run.weights(), training().run(2).weights())


def test_a_rank_of_a_writer_that_was_replaced_publishes_nothing(
    tmp_path: Path, always_sharded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has locked the folder, and rank 1 is the last one to write."""
    write, done = tensor_file.write, threading.Event()

    def train(backend: Backend) -> None:
        run = wide(backend).run(1)
        saves = checkpoint(tmp_path, run, run="job")

        def slow_write(file: Any, name: str, tensors: Any) -> Any:
            if name == file_name(1):
                assert done.wait(100)
                replace()
            written = write(file, name, tensors)
            if name == file_name(0):
                done.set()
            return written

        monkeypatch.setattr(tensor_file, "write", slow_write)
        with pytest.raises(RuntimeError, match="was taken over by process"):
            saves.save()
        saves.close()

    def replace() -> None:
        monkeypatch.setattr(tensor_file, "write", write)
        with monkeypatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: "another")
            new.append(checkpoint(tmp_path, training(), run="job"))

    new = list[vbs.Checkpoint]()
    run_ranks(train, 2)
    assert names(tmp_path) == []
    new[0].close()


def test_a_writer_on_another_host_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may hold the lock of a host that has ended, for minutes or for ever."""
    run = training().run(1)
    first = checkpoint(tmp_path, run, run="job")
    monkeypatch.setattr(socket, "gethostname", lambda: "b")
    with pytest.raises(RuntimeError, match=r"in use by process \d+ on .* wait for \d+ s if it has ended"):
        checkpoint(tmp_path, training(), run="another")
    second = checkpoint(tmp_path, training(), run="job")
    with pytest.raises(RuntimeError, match=r"was taken over by process .* on b"):
        first.save()
    first.close()
    with pytest.raises(
        RuntimeError, match=r"by process .* on b of the job \"job\"; .* pass run=\"job\" "
    ):  # the file is not locked
        checkpoint(tmp_path, training(), run="another")
    second.close()
    third = checkpoint(tmp_path, training(), run="another")
    monkeypatch.setattr(socket, "gethostname", lambda: "c")
    clock = time.time()
    monkeypatch.setattr(lease.time, "time", lambda: clock + lease.SECONDS + 1)
    with checkpoint(tmp_path, training()):
        pass
    third.close()


def test_ranks_without_locks_write_together(tmp_path: Path, no_flock: None, always_sharded: None) -> None:
    def train(backend: Backend) -> None:
        run = wide(backend).run(1)
        with checkpoint(tmp_path, run) as saves:
            saves.save()

    run_ranks(train, 2)
    assert len(list((tmp_path / "update-00000001").glob("tensors-*"))) == 2


def test_a_closed_checkpoint_does_not_save(tmp_path: Path) -> None:
    run = training().run(1)
    with checkpoint(tmp_path, run) as saves:
        pass
    with pytest.raises(RuntimeError, match=rf"{tmp_path} is not locked by .* closed .*; create another"):
        saves.save()
    assert names(tmp_path) == []
