"""What interrupts, deleted folders, links, damaged files and empty tensors leave of checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, save_checkpoint, start, updates
from helpers.reference import training
from variable_batch_size.checkpoint import writer
from variable_batch_size.checkpoint.saving import WriteThread
from variable_batch_size.checkpoint.storage import Storage


def test_an_interrupt_after_the_json_leaves_no_checkpoint_without_tensors(tmp_path, monkeypatch):
    run = training().run(1)
    saves = checkpoint(tmp_path, run, keep=1)
    saves.save()
    run.run(1)
    fsync = os.fsync

    def interrupt(descriptor):
        fsync(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saves.save()
    saves.close()
    assert updates(tmp_path) == [1]


@pytest.mark.parametrize("begins", [True, False])
def test_an_interrupt_while_a_write_begins_leaves_its_memory_alone(begins, tmp_path, monkeypatch):
    run = training().run(1)
    saves = checkpoint(tmp_path, run, keep=9)
    submit = WriteThread.submit

    def interrupt(thread, work):
        if begins:
            submit(thread, work)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WriteThread, "submit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saves.save(wait=False)
    weights = run.model.state_dict()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    run.run(1)
    saves.save(wait=False)
    saves.close()
    paths = [*tmp_path.glob("update-00000001-*")]  # the next save has waited for the write, if it had begun
    assert len(paths) == begins
    for path in paths:
        found = vbs.read_checkpoint(path)["parts"]["model"]
        assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    assert vbs.read_checkpoint(tmp_path)["facts"]["updates"] == 2


INTERRUPTED = """
import random, signal, threading
from functools import partial
from variable_batch_size.checkpoint.saving import WriteThread

done, begun, ended, armed = [], [], threading.Event(), False

def interrupts():
    rng = random.Random(3)
    while not ended.wait(rng.uniform(0, 2e-4)):
        signal.raise_signal(signal.SIGINT)

def handle(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

def work(number):
    begun.append(number)
    done.append(number)

signal.signal(signal.SIGINT, handle)
threading.Thread(target=interrupts, daemon=True).start()
number, interrupted = 0, 0
while number < 1000 or interrupted < 50:
    thread = WriteThread()  # which starts a thread, in which there are many instants
    for _ in range(5):
        try:
            armed = True
            thread.submit(partial(work, number))
            armed = False
        except KeyboardInterrupt:
            interrupted += 1
        while True:
            try:
                armed = True
                thread.wait()
                armed = False
                break
            except KeyboardInterrupt:
                interrupted += 1
        assert begun == done  # nothing is under way after a wait
        number += 1
ended.set()
assert done == sorted(set(done)) and len(done) > 100
print(True)
"""


def test_interrupts_at_any_instant_leave_the_works_of_a_thread_whole():
    """Each is done once, or not at all if its begin was interrupted, and a wait ends, whenever signals come."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=100)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_a_write_that_fails_is_told_at_the_end_of_the_process(tmp_path):
    """Also if the training ends without close()."""
    script = """
saves = checkpoint(folder, training().run(1))
saves.save()
type(saves._saver._folder).write = lambda *_: 1 / 0
saves.save(wait=False)
"""
    process = start(script, tmp_path)
    _, told = process.communicate()
    assert process.returncode == 0
    assert "RuntimeWarning: Checkpoint update-00000001 could not be written to" in told


def test_a_writer_whose_folder_was_deleted_and_begun_again_raises(tmp_path):
    folder = tmp_path / "a"
    first = checkpoint(folder, training().run(1))
    shutil.rmtree(folder)
    writer._open.clear()  # as another process
    second = checkpoint(folder, training())
    with pytest.raises(RuntimeError, match="writes no checkpoint; end it"):
        first.save()
    second.close()


def test_a_damaged_file_of_a_writer_hides_and_deletes_nothing(tmp_path):
    run = training().run(1)
    save_checkpoint(tmp_path, run, keep=9)
    save_checkpoint(tmp_path, run.run(1), keep=9)
    (path,) = tmp_path.glob(".writer-*")
    path.write_text(path.read_text().replace("update-00000001", "update-00000007"))
    with checkpoint(tmp_path, again := training(), keep=9) as saves:
        assert saves.restore()
        again.run(1)
        saves.save()
    assert updates(tmp_path) == [1, 2, 3]


def test_the_best_checkpoint_stays_where_it_cannot_be_read_now(tmp_path, monkeypatch):
    run = training().run(1)
    with checkpoint(tmp_path, run, keep=1, best="min:loss") as saves:
        saves.report(loss=1.0)
        run.run(1)
        saves.save()
    read = Storage.read

    def stale(storage, *names):
        if names[0].startswith("update-00000001"):
            raise OSError(116, "Stale file handle")
        return read(storage, *names)

    run.run(1)
    with checkpoint(tmp_path, run, keep=1, best="min:loss") as saves, monkeypatch.context() as patch:
        patch.setattr(Storage, "read", stale)
        saves.save()
    assert updates(tmp_path) == [1, 3]


def test_a_link_to_the_folder_is_the_folder(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    first, second = (checkpoint(tmp_path / name, training().run(1)) for name in ("link", "real"))
    with pytest.raises(RuntimeError, match="was followed by another one"):
        first.save()
    second.save()
    second.close()


def test_a_changed_version_is_damage(tmp_path):
    run = training().run(1)
    with checkpoint(tmp_path, run) as saves:
        saves.save()
        run.run(1)
        path = Path(saves.save()) / "rank-0.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 3'))
    with checkpoint(tmp_path, training()) as saves:
        with pytest.warns(RuntimeWarning, match="Damaged"):
            assert saves.restore()
        assert "update-00000001" in str(saves.latest)


def test_a_cell_that_runs_again_takes_ctrl_c_over(tmp_path):
    """Whether the earlier object is closed, or not, and after it has got an interrupt."""
    before = signal.getsignal(signal.SIGINT)
    first = checkpoint(tmp_path, training().run(1), on_interrupt="save")
    signal.raise_signal(signal.SIGINT)
    run = training()
    with checkpoint(tmp_path, run, on_interrupt="save") as second:
        first.close()
        run.run(1)
        assert not second.step()
        run.run(1)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit):
            second.step()
    assert updates(tmp_path) == [2]
    assert signal.getsignal(signal.SIGINT) is before
