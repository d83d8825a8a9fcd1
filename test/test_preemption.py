"""Real signals to real processes."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import threading
import time

import pytest

import variable_batch_size as vbs
from helpers.checkpoints import intact, messages, start
from variable_batch_size.backend._xla_launch import run_by
from variable_batch_size.preemption import EXIT_CODE, active_preemption, signal_notice

SIGNALS = [signal.SIGTERM, signal.SIGUSR1]

# A main thread that waits in C, where Python runs no handlers, and a thread that prints the signal.
STUCK = """
from variable_batch_size.preemption import signal_notice
import ctypes, threading, time
with vbs.Preemption() as preemption:
    def report():
        while not preemption.requested:
            time.sleep(0.01)
        print(signal_notice(), flush=True)
    threading.Thread(target=report, daemon=True).start()
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.fixture
def processes():
    """Processes that end with the test."""
    started = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow("starts a process")
def test_a_main_thread_blocked_in_c_records_the_first_signal_and_exits_on_the_second(tmp_path, processes):
    process = start(STUCK, tmp_path)
    processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert re.fullmatch(r"[01]\.\d\d s after SIGUSR1\n", process.stdout.readline())
    process.send_signal(signal.SIGUSR1)  # the same request, from another sender
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == EXIT_CODE == 143


def test_handlers_are_restored_after_the_context():
    before = [signal.getsignal(number) for number in SIGNALS], signal.set_wakeup_fd(-1)
    with vbs.Preemption() as preemption:
        assert active_preemption() is preemption
        assert (preemption.requested, signal_notice()) == (False, "")
        with pytest.raises(RuntimeError, match=r"one Preemption at a time, .*; remove one of them"), vbs.Preemption():
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(preemption)
        assert signal_notice().endswith("s after SIGUSR1")
    assert ([signal.getsignal(number) for number in SIGNALS], signal.set_wakeup_fd(-1)) == before
    assert (active_preemption(), signal_notice()) == (None, "")
    with preemption:  # a second time
        assert not preemption.requested


def test_rejects_entry_outside_of_the_main_thread():
    errors = []

    def enter():
        try:
            with vbs.Preemption():
                pass
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter, name="rank 1")
    thread.start()
    thread.join()
    assert errors == [
        "Preemption must be entered in the main thread, got thread 'rank 1'; enter it before the ranks are launched"
    ]


def test_signals_are_passed_on_to_the_previous_wakeup_fd():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    try:
        with vbs.Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(preemption)
        assert os.read(reader, 10) == bytes([signal.SIGTERM])
    finally:
        assert signal.set_wakeup_fd(-1) == writer
        os.close(reader)
        os.close(writer)


def test_the_first_signal_is_recorded_without_the_wakeup_fd():
    with vbs.Preemption() as preemption:
        assert signal.set_wakeup_fd(-1) != -1
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(preemption)


def test_a_signal_that_has_no_handlers_leaves_nothing_behind():
    before = [signal.getsignal(number) for number in SIGNALS], threading.active_count()
    with pytest.raises(OSError, match="Invalid argument"), vbs.Preemption([*SIGNALS, signal.SIGKILL]):
        pass
    assert ([signal.getsignal(number) for number in SIGNALS], threading.active_count()) == before
    assert (active_preemption(), signal.set_wakeup_fd(-1)) == (None, -1)


def test_launches_nothing_after_a_signal():
    with vbs.Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(preemption)
        with pytest.raises(SystemExit) as end:
            run_by(pytest.fail, print, ())
        assert end.value.code == EXIT_CODE


def test_a_forked_child_handles_its_own_signals_and_not_those_of_its_parent():
    with vbs.Preemption() as preemption:
        for number in SIGNALS:
            reader, writer = os.pipe()
            if (child := os.fork()) == 0:
                try:
                    preemption.__exit__(None, None, None)
                    os.write(writer, b"ready")
                    time.sleep(100)
                finally:
                    os._exit(0)
            assert os.read(reader, 5) == b"ready"
            os.close(reader)
            os.close(writer)
            os.kill(child, number)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
        assert not preemption.requested
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(preemption)


def wait_for(preemption):
    deadline = time.monotonic() + 30
    while not preemption.requested:
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ------------------------------------------------------------------------------------- a training that is asked to stop

RANK = """
import torch.distributed as dist
rank = int(sys.argv[2])
with vbs.Preemption():
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
    run = training(sizes=[5, 2, 9], backend=vbs.backend.DistributedBackend())
    try:
        with checkpoint(folder / "saved", run) as saves:
            while True:
                run.run(1)
                saves.step()
                if run.optimizer.updates == 3:
                    print("ready", flush=True)
    finally:
        print(run.optimizer.updates)
        dist.destroy_process_group()
"""
LOADER = """
from torch.utils.data import DataLoader, TensorDataset
run = training(sizes=[5])
loader = DataLoader(
    TensorDataset(run.x, run.target),
    batch_sampler=run.sampler,
    num_workers=1,
    worker_init_fn=vbs.Preemption.shield,
    persistent_workers=True,
)
with vbs.Preemption((signal.Signals(int(sys.argv[2])),)), checkpoint(folder / "saved", run) as saves:
    for epoch in range(10**9):
        run.sampler.set_epoch(epoch)
        run.optimizer.set_epoch(epoch)
        for x, target in loader:
            (run.model(x) - target).square().sum(dim=1).mean().backward()
            run.optimizer.step()
            saves.step()
        print("ready", flush=True)  # the worker has sent a microbatch, so that it is shielded
"""
STOPPED = r"Checkpoint (update-\S+) saved \d+\.\d\d s after (\w+); exiting with 143\."


def wait_for_line(process, expected):
    """Wait until the process prints this line; gloo prints others before."""
    assert process.stdout is not None
    while (line := process.stdout.readline()) != f"{expected}\n":
        assert line


def exit_lines(process, received):
    """Check that the process exits as after a signal, and return its remaining lines of output, then of errors."""
    out, err = process.communicate(timeout=100)
    assert process.returncode == EXIT_CODE, err
    told = messages(err)
    if received:
        assert told.pop(0) == f"{received.name}: Checkpoint.step() saves after this update, and exits."
    return out.splitlines() + told


def test_all_ranks_stop_after_the_same_update_when_one_gets_a_signal(tmp_path, processes):
    processes += [start(RANK, tmp_path, rank) for rank in range(3)]
    for process in processes:
        wait_for_line(process, "ready")
    processes[2].send_signal(signal.SIGUSR1)
    lines = [exit_lines(process, signal.SIGUSR1 if rank == 2 else None) for rank, process in enumerate(processes)]
    (updates,) = {int(rank[0]) for rank in lines}
    match = re.fullmatch(STOPPED, lines[0][1])
    assert match is not None
    assert match[1].startswith(f"update-{updates:08d}-")
    assert match[2] == "SIGUSR1"
    assert intact(tmp_path / "saved" / match[1])
    assert [len(rank) for rank in lines] == [2, 1, 1]


@pytest.mark.slow("starts a process")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_process_group_does_not_end_the_workers_of_a_loader(sent, tmp_path, processes):
    process = start(LOADER, tmp_path, int(sent), new_session=True)
    processes.append(process)
    wait_for_line(process, "ready")
    os.killpg(process.pid, sent)
    match = re.fullmatch(STOPPED, exit_lines(process, sent)[-1])
    assert match is not None
    assert intact(tmp_path / "saved" / match[1])


@pytest.mark.slow("starts XLA")
@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")
@pytest.mark.parametrize(
    "launcher",
    [
        "launch(work, args, cores=2)",
        pytest.param(
            "run_by(torch_xla.launch, partial(_without_ordinal, work), args)",
            marks=pytest.mark.nightly("starts XLA by its own launcher"),
        ),
    ],
)
def test_a_program_that_launched_cores_exits_with_them(launcher, tmp_path, processes):
    script = f"""
from functools import partial
import torch_xla
from variable_batch_size.backend._xla_launch import run_by
from variable_batch_size.backend.xla import _without_ordinal, launch
from helpers.xla_checkpoints import XlaCase, train_until_signal as work
args = (folder, XlaCase(vbs.AdaScaleOptimizer, (5, 2, 9), 4))
with vbs.Preemption():
    {launcher}
"""
    process = start(script, tmp_path)
    processes.append(process)
    wait_for_line(process, "update 5")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=100)
    assert process.returncode == EXIT_CODE, err
    (match,) = re.finditer(STOPPED, err)  # by the handler that torch_xla has added to the root logger
    assert intact(tmp_path / "checkpoints" / match[1])
    updates = {f"update-{int(path.read_text()):08d}" for path in tmp_path.glob("updates*")}
    assert updates == {match[1][:15]}
