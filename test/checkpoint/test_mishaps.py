"""What interrupts, deleted folders, links, damaged files and empty tensors leave of checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, save_checkpoint, start, updates
from helpers.reference import training
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.checkpoint import tensor_file, writer
from variable_batch_size.checkpoint.saving import Saver
from variable_batch_size.checkpoint.storage import Storage
from variable_batch_size.checkpoint.write_thread import WriteThread
from variable_batch_size.testing import run_ranks


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
import dis, itertools, sys
from functools import partial
from variable_batch_size.checkpoint.storage import Storage
from variable_batch_size.checkpoint.write_thread import WriteThread
from variable_batch_size.testing import run_ranks
from variable_batch_size.checkpoint.writer import Writer

left, last = 0, {}  # instants; the last instruction of each frame

def trace(frame, event, _):
    global left
    frame.f_trace_opcodes = True
    if event == "opcode":
        before, last[frame] = last.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
        left -= before.startswith(("CALL", "RESUME", "JUMP"))  # after which CPython looks for signals
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
    return trace

def is_interrupted(call, at):
    global left
    left = at
    last.clear()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False

for begun in (False, True):
    for at in itertools.count(1):
        thread, done = WriteThread(), []
        if begun:
            thread.submit(partial(done.append, 0))
        begin_is_cut = is_interrupted(partial(thread.submit, partial(done.append, 1)), at)
        wait_is_cut = is_interrupted(thread.wait, at)
        thread.wait()
        assert done in ([0] * begun + [1], *[[0] * begun] * begin_is_cut), (begun, at, done)
        thread.submit(partial(done.append, 2))
        thread.wait()
        assert done[-1] == 2, (begun, at, done)
        if not begin_is_cut and not wait_is_cut:
            break
    assert at > 5, at
for at in itertools.count(1):
    writer = Writer(Storage(sys.argv[1]), None)
    writer.acquire(0)
    is_cut = is_interrupted(writer._stop, at)
    writer._stop()
    if not is_cut:
        break
assert at > 3, at
print(True)
"""


def test_a_checkpoint_can_be_closed_again_after_an_exception(tmp_path):
    saves = checkpoint(tmp_path, training().run(1))
    saves.save(wait=False)
    saves.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    saves.close()
    assert updates(tmp_path) == [1]


def test_an_interrupt_at_any_instant_leaves_the_functions_of_a_thread_whole(tmp_path):
    """Each runs once, or not at all if its `submit` was interrupted; waits end, also later ones; so does a writer."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


ENDS = """
import _thread, atexit, gc, multiprocessing, sys, time
from functools import partial
from variable_batch_size.checkpoint.write_thread import WriteThread
from variable_batch_size.testing import run_ranks

def say(text):
    time.sleep(0.1)
    print(text, flush=True)

def begin(*texts):
    thread = WriteThread()
    for text in texts:
        thread.submit(partial(say, text))
    return thread

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=begin, args=("forked",))
    process.start()  # in it atexit calls nothing
    process.join()
    atexit.register(begin, "at exit")  # after the others
    begin("dropped").wait()
    gc.collect()
    while _thread._count():  # without the one of this process
        time.sleep(0.01)
    print("no thread", flush=True)
    begin("one", "two")
    begin().submit(partial(int, "error"))
"""


def test_functions_have_run_when_the_process_ends():
    """Also in a forked one, which ends without atexit, and of a thread that was dropped; its thread ends."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", ENDS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.stdout.splitlines() == ["forked", "dropped", "no thread", "one", "two", "at exit"]
    assert "RuntimeWarning: invalid literal for int()" in ended.stderr


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


@pytest.mark.slow("starts a process")
def test_ctrl_c_at_the_end_of_the_process_lets_the_write_end(tmp_path):
    """The write sends the signal when the process waits for it, and continues when it was told what it does."""
    script = """
import logging, os, signal, time
from variable_batch_size.checkpoint import write_thread
saves, told = checkpoint(folder, training().run(1)), []
kind = type(saves._saver._folder)
def write(*arguments, write=kind.write):
    while not write_thread._process_ends:
        time.sleep(1e-3)
    os.kill(os.getpid(), signal.SIGINT)
    while not told:
        time.sleep(1e-3)
    write(*arguments)
kind.write = write
class Told(logging.Handler):
    def emit(self, record):
        told.append(record)
logging.getLogger("variable_batch_size").addHandler(Told())
saves.save(wait=False)
"""
    process = start(script, tmp_path)
    _, error = process.communicate(timeout=100)
    assert (process.returncode, error) == (0, "")
    assert updates(tmp_path) == [1]


def test_a_close_waits_for_a_write_whose_save_was_interrupted(tmp_path, monkeypatch):
    run, write, submit = training().run(1), tensor_file.write, WriteThread.submit
    saves, waits = checkpoint(tmp_path, run), threading.Event()

    def write_late(*arguments):
        assert waits.wait(100)
        return write(*arguments)

    def interrupt(thread, work):
        submit(thread, work)
        raise KeyboardInterrupt

    def wait(thread, wait=WriteThread.wait):
        waits.set()
        return wait(thread)

    monkeypatch.setattr(tensor_file, "write", write_late)
    with monkeypatch.context() as patch:
        patch.setattr(WriteThread, "submit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saves.save(wait=False)
    monkeypatch.setattr(WriteThread, "wait", wait)
    try:
        saves.close()
        assert updates(tmp_path) == [1]
    finally:
        waits.set()


def test_ranks_whose_save_was_interrupted_restore_together(tmp_path, monkeypatch):
    """Also where only one of them has begun to write."""
    write, submit, wait, to_json = tensor_file.write, WriteThread.submit, WriteThread.wait, Saver._json_of_other_rank
    waits, saved = threading.Event(), []

    def write_late(*arguments):
        assert waits.wait(100)
        return write(*arguments)

    def note_wait(thread):
        waits.set()
        return wait(thread)

    def interrupt(thread, work):
        waits.clear()
        submit(thread, work)
        raise KeyboardInterrupt

    def interrupt_second(saver, state):
        saved.append(state)
        if len(saved) == 2:
            raise KeyboardInterrupt
        return to_json(saver, state)

    def train(backend):
        run = training(backend=backend).run(1)
        saves = checkpoint(tmp_path, run, keep=9)
        saves.save()
        run.run(1)
        with pytest.raises(KeyboardInterrupt):
            saves.save(wait=False)
        assert saves.restore()
        saves.close()
        return run.optimizer.updates

    monkeypatch.setattr(tensor_file, "write", write_late)
    monkeypatch.setattr(WriteThread, "wait", note_wait)
    monkeypatch.setattr(WriteThread, "submit", interrupt)
    monkeypatch.setattr(Saver, "_json_of_other_rank", interrupt_second)
    try:
        assert run_ranks(train, 2) == [2, 2]
    finally:
        waits.set()


@pytest.mark.parametrize("interrupted", ["copy_and_begin", "_tidy"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_one_rank_has_not_ended_keeps_the_ranks_together(interrupted, rank, tmp_path, monkeypatch):
    """On one rank the interrupt comes right after an exchange, on the other one after the save."""
    exchange, calls = Agreement.run_on_all, []

    def run_on_all(agreement, call, work):
        texts = exchange(agreement, call, work)
        if agreement.world.rank == rank and getattr(work, "__name__", "") == interrupted:
            calls.append(call)
            if len(calls) == 2:
                raise KeyboardInterrupt
        return texts

    def train(backend):
        run = training(backend=backend).run(1)
        saves = checkpoint(tmp_path, run, keep=9)
        saves.save()
        run.run(1)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            saves.save(wait=interrupted == "_tidy")
            raise KeyboardInterrupt
        assert saves.restore()
        found = run.optimizer.updates
        run.run(1)
        saves.save()
        saves.close()
        return found

    monkeypatch.setattr(Agreement, "run_on_all", run_on_all)
    expected = 1 if (interrupted, rank) == ("copy_and_begin", 0) else 2  # rank 0 writes
    assert run_ranks(train, 2) == [expected] * 2


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


def test_a_save_before_step_does_not_hide_a_signal(tmp_path):
    run = training()
    with vbs.Preemption(), checkpoint(tmp_path, run) as saves, pytest.raises(SystemExit):  # noqa: PT012
        while run.optimizer.updates < 9:
            run.run(1)
            if run.optimizer.updates == 3:
                signal.raise_signal(signal.SIGTERM)
            saves.save()
            saves.step()
    assert run.optimizer.updates == 3
    assert updates(tmp_path)[-1] == 3


def test_the_save_of_a_signal_at_the_end_of_an_epoch_resumes_before_that_end(tmp_path):
    """Also if the loop has just saved the same update."""
    run = training(sizes=[10] * 5)
    with vbs.Preemption(), checkpoint(tmp_path, run) as saves, pytest.raises(SystemExit):  # noqa: PT012
        for number in range(1, 6):
            run.run(1)
            if number == 5:
                signal.raise_signal(signal.SIGTERM)
            saves.save(in_loop=True)
            saves.step()
    later = training(sizes=[10] * 5)
    with checkpoint(tmp_path, later) as saves:
        assert saves.restore()
    assert (later.optimizer.epoch, later.sampler.training.end_pending) == (0, True)


def test_a_close_after_the_close_of_an_exception_exchanges_nothing(tmp_path, monkeypatch):
    """Perhaps only one rank had it."""
    saves = checkpoint(tmp_path, training().run(1))
    saves.save(wait=False)
    saves.__exit__(KeyError, KeyError(), None)
    monkeypatch.setattr(Agreement, "run_on_all", lambda *_: pytest.fail("an exchange"))
    saves.close()
