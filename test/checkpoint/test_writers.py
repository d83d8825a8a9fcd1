"""The one writer of a folder: who takes over from whom, and what becomes of checkpoints that come late."""

from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import variable_batch_size as vbs
from helpers.checkpoints import as_another_process, checkpoint, names, start, two_saved, updates
from helpers.reference import training
from helpers.sharded import always_sharded, wide
from variable_batch_size.checkpoint import tensor_file, writer
from variable_batch_size.checkpoint.folder import Folder
from variable_batch_size.checkpoint.storage import Storage
from variable_batch_size.testing import run_ranks

__all__ = ["always_sharded"]


@pytest.fixture
def no_locks(monkeypatch):
    """Let all file systems be ones without locks, as some network file systems are: they count as stores."""

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "lockf", refuse)


def make_old(folder, seconds):
    """Let the file of the writer be older."""
    (file,) = folder.glob(".writer-*")
    os.utime(file, (time.time() - seconds,) * 2)


def test_a_checkpoint_is_not_a_folder_of_checkpoints(tmp_path):
    folder = two_saved(tmp_path)
    before, path = names(folder), folder / names(folder)[1]
    with pytest.raises(RuntimeError, match=r"got the checkpoint .*/update-00000002\S+; pass the folder that it is in"):
        checkpoint(path, training())
    assert names(folder) == before
    assert not list(path.glob(".*"))


@pytest.mark.slow("starts a process")
def test_another_process_is_refused_at_once_and_may_write_when_the_first_one_is_killed(tmp_path):
    """Also if a child of the one that was killed lives on."""
    script = """
import os, time
saves = checkpoint(folder, training())
if os.fork() == 0:
    time.sleep(100)
print("ready", flush=True)
time.sleep(100)
"""
    process = start(script, tmp_path, new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        with pytest.raises(RuntimeError, match=rf"{tmp_path} is in use by process {process.pid} on .*; end that"):
            checkpoint(tmp_path, training(), run="any")
        process.kill()
        process.wait()
        checkpoint(tmp_path, training()).close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_later_object_of_this_process_takes_over(tmp_path):
    """As when a notebook's cell runs again."""
    run, again = training(), training()
    first = checkpoint(tmp_path, run)
    run.run(1)
    first.save()
    second = checkpoint(tmp_path, again)
    assert second.restore()
    run.run(1)
    with pytest.raises(RuntimeError, match=rf"{tmp_path} is not written by this Checkpoint, which .*; use another"):
        first.save()
    first.close()
    again.run(1)
    second.save()
    second.close()
    assert updates(tmp_path) == [1, 2]
    with pytest.raises(RuntimeError, match=r"is not written by this Checkpoint, which was closed.*; create another"):
        second.save()


def test_an_object_that_was_dropped_needs_no_wait(tmp_path, no_locks):
    """Of this process, also where its record stays, as in a store."""
    run = training().run(1)
    checkpoint(tmp_path, run).save()
    gc.collect()
    with checkpoint(tmp_path, training()) as later:
        assert later.restore()


LOCKED = """
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("locked")
"""


def test_a_copy_of_the_folder_leaves_it_locked(tmp_path):
    """POSIX drops the locks that a process has on a file when it closes any descriptor of it."""
    folder, command = tmp_path / "a", [sys.executable, "-c", LOCKED, str(tmp_path / "a" / ".lock")]
    run = training().run(1)
    with checkpoint(folder, run) as saves:
        saves.save()
        shutil.copytree(folder, tmp_path / "b")
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
        run.run(1)
        saves.save()
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "locked\n"


def test_a_folder_that_cannot_be_read_beside_checkpoints_is_left_alone(tmp_path, monkeypatch):
    """As lost+found at the root of a volume."""
    (tmp_path / "lost+found").mkdir()
    listdir = os.listdir

    def refuse(path):
        if "lost+found" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with checkpoint(tmp_path, training().run(1)) as saves:
        saves.save()
        assert saves.restore()
    assert vbs.read_checkpoint(tmp_path)


def test_a_forked_child_neither_writes_nor_releases(tmp_path):
    run = training().run(1)
    saves = checkpoint(tmp_path, run)

    def child(pipe):
        for call in (saves.save, lambda: checkpoint(tmp_path, training())):
            try:
                call()
            except RuntimeError as error:
                pipe.send(str(error))

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    assert "a forked process" in ours.recv()
    assert "is in use by process" in ours.recv()
    process.join()
    saves.save()
    saves.close()


def test_without_locks_another_job_waits_for_ten_minutes_whatever_the_clocks_say(tmp_path, no_locks, monkeypatch):
    stale = training().run(1)
    first = checkpoint(tmp_path, stale, run="a")
    refused = pytest.raises(RuntimeError, match=r'"a"; end that process or .* Checkpoint, pass run="a" .* for \d+ s')
    now = time.time()
    for jump in (0.0, 1e6, -1e6):
        as_another_process()
        with monkeypatch.context() as patch, refused:
            patch.setattr(time, "time", lambda jump=jump: now + jump)
            checkpoint(tmp_path, training(), run="b")
    make_old(tmp_path, writer.SECONDS - 30)
    with pytest.raises(RuntimeError, match=r"wait for (2[0-9]|30) s"):
        checkpoint(tmp_path, training())
    make_old(tmp_path, writer.SECONDS + 1)
    second = checkpoint(tmp_path, training(), run="b")
    with pytest.raises(RuntimeError, match=rf"was taken over by process {os.getpid()} on .* writes no checkpoint; end"):
        first.save()
    first.close()
    second.close()
    checkpoint(tmp_path, training()).close()  # a folder that was closed is free


def test_a_writer_on_another_host_may_have_ended_without_a_word(tmp_path, monkeypatch):
    """A network file system may hold the lock of a host that has ended, for minutes or for ever."""
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    first = checkpoint(tmp_path, training(), run="job")
    monkeypatch.setattr(socket, "gethostname", lambda: "b")

    def held(*_):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(fcntl, "lockf", held)
    as_another_process()
    with pytest.raises(RuntimeError, match=r"in use by process \d+ on a of .* wait for \d+ s if it has ended"):
        checkpoint(tmp_path, training())
    checkpoint(tmp_path, training(), run="job").close()
    del first


def test_a_writer_lives_between_its_saves(tmp_path, no_locks, monkeypatch):
    """As in a job that saves every 30 minutes, and calls nothing in between."""
    monkeypatch.setattr(writer, "RENEWAL", 0.02)
    saves = checkpoint(tmp_path, training())
    make_old(tmp_path, 2 * writer.SECONDS)
    deadline = time.monotonic() + 30
    while Folder(tmp_path).storage.age(".writer-0001") > writer.SECONDS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    as_another_process()
    with pytest.raises(RuntimeError, match="is in use by"):
        checkpoint(tmp_path, training())
    saves.close()


def lock_at_once(folder, begins, results):
    begins.wait()
    try:
        Folder(folder, "job").lock()
        results.put("")
    except OSError as error:
        results.put(str(error))
    results.close()
    results.join_thread()
    os._exit(0)  # without what the process has inherited


def test_of_six_that_begin_at_the_same_time_the_last_one_writes(tmp_path, no_locks):
    fork = multiprocessing.get_context("fork")
    begins, results = fork.Barrier(6), fork.Queue()
    processes = [fork.Process(target=lock_at_once, args=(tmp_path, begins, results)) for _ in range(6)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert "" in found
    assert all(text == "" or "is in use by" in text for text in found)  # some may have begun a little later
    assert len(list(tmp_path.glob(".writer-*"))) >= 1


def test_a_writer_whose_file_a_later_one_deletes_is_in_use(tmp_path, no_locks, monkeypatch):
    """As where several begin at the same time, between the look at the file and at its age."""
    first = checkpoint(tmp_path, training())
    as_another_process()

    def deleted(*_):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(Storage, "age", deleted)
    with pytest.raises(RuntimeError, match="is in use by process"):
        checkpoint(tmp_path, training())
    first.close()


def test_what_a_writer_saves_late_is_never_the_newest(tmp_path, no_locks, monkeypatch):
    """Those of a job take over at once; see also test_takeover.py."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    stale, run = training().run(1), training()
    first = checkpoint(tmp_path, stale)
    first.save()
    as_another_process()
    with checkpoint(tmp_path, run) as second:
        assert second.restore()
        run.run(1)
        second.save()
        late = tmp_path / "update-00000009-0001-7-1"
        shutil.copytree(tmp_path / "update-00000001-0001-1-1", late)
        assert (second.latest or "").endswith("update-00000002-0002-1-1")
    as_another_process()
    again = training()
    with checkpoint(tmp_path, again) as third:
        assert third.restore()
        assert again.optimizer.updates == 2
        again.run(1)
        third.save()
    assert updates(tmp_path) == [2, 3]
    assert not late.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_writer_saves_while_another_one_takes_over_does_not_count(
    rank, tmp_path, always_sharded, no_locks, monkeypatch
):
    """It is replaced while a rank of it writes, before the other one has."""
    new, write, replaced = list[Any](), tensor_file.write, threading.Event()

    def replace_and_write(file, *rest):
        if f"tensors-{rank}" in file.name and not new:
            as_another_process()
            new.append(None)
            new.append(checkpoint(tmp_path, training(), run="job"))
            replaced.set()
        elif len(new) < 2 and "tensors-" in file.name:
            assert replaced.wait(60)
        return write(file, *rest)

    monkeypatch.setattr(tensor_file, "write", replace_and_write)

    def train(backend):
        run = wide(backend).run(1)
        saves = checkpoint(tmp_path, run, run="job")
        with pytest.raises(RuntimeError, match="was taken over by process"):
            saves.save()
        saves.close()

    run_ranks(train, 2)
    assert updates(tmp_path) == []
    new[1].close()


def test_ranks_without_locks_write_together(tmp_path, no_locks, always_sharded):
    def train(backend):
        run = wide(backend).run(1)
        with checkpoint(tmp_path, run) as saves:
            return saves.save()

    path, _ = run_ranks(train, 2)
    assert len(list(Path(path).glob("tensors-*"))) == 2


JSON = {"rank-0.json", "rank-1.json"}


def test_the_files_of_two_saves_of_one_name_are_never_mixed(tmp_path, always_sharded):
    """As where a folder was begun again while a rank of an earlier job still wrote, or was copied in part."""

    def train(backend, seed):
        run = wide(backend, sampling={"seed": seed}).run(2)
        with checkpoint(tmp_path / str(seed), run) as saves:
            saves.save()

    weights = list[Any]()
    for seed in range(2):
        run_ranks(partial(train, seed=seed), 2)
        weights.append(vbs.read_checkpoint(tmp_path / str(seed))["parts"]["model"])
    (first,), (other,) = ([*(tmp_path / str(seed)).glob("update-*")] for seed in range(2))
    assert first.name == other.name
    files, damaged = sorted(path.name for path in first.iterdir()), 0
    assert len(files) == 4
    for taken in (set(some) for count in range(5) for some in combinations(files, count)):
        shutil.rmtree(tmp_path / "mixed", ignore_errors=True)
        shutil.copytree(first, tmp_path / "mixed" / first.name)
        for name in taken:
            shutil.copy(other / name, tmp_path / "mixed" / first.name / name)
        try:
            found = vbs.read_checkpoint(tmp_path / "mixed")["parts"]["model"]
        except ValueError as error:
            told = str(error)
            damaged += 1
        else:
            told, intact = "", [all(torch.equal(found[key], one[key]) for key in one) for one in weights]
            assert any(intact), taken
        assert ("(the files of its ranks are of two saves)" in told) == (len(taken & JSON) == 1)
    assert damaged == 14


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_goes_on_in_a_folder_that_was_begun_again_leaves_its_files_alone(
    rank, tmp_path, always_sharded, monkeypatch
):
    """It stops before it writes, and goes on when another training has saved under the same name."""
    folder, create, begun = tmp_path / "a", Storage.create, list[Any]()

    def train(backend, seed=0):
        run = wide(backend, sampling={"seed": seed}).run(1)
        saves = checkpoint(folder, run)
        try:
            saves.save()
        except RuntimeError as error:
            assert "end one of them" in str(error) or "end it" in str(error)  # noqa: PT017
            return None
        return saves

    def begin_again_and_create(storage, *names, **options):
        if names[-1] == f"tensors-{rank}.safetensors" and not begun:
            begun.append(None)
            while not [*folder.glob(f"update-*/rank-{1 - rank}.json")]:
                time.sleep(0.01)
            shutil.rmtree(folder)
            as_another_process()
            begun.extend(run_ranks(partial(train, seed=1), 2))
        return create(storage, *names, **options)

    monkeypatch.setattr(Storage, "create", begin_again_and_create)
    assert run_ranks(train, 2) == [None, None]
    assert updates(folder) == [1]
    begun[1].close()
