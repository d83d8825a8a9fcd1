"""Real signals to real processes."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import variable_batch_size as vbs
from helpers.checkpoints import start
from variable_batch_size.backend._xla_launch import run_by
from variable_batch_size.checkpoint.folder import whole
from variable_batch_size.preemption import EXIT_CODE, current, notice

STOPS = [signal.SIGTERM, signal.SIGUSR1]

# A main thread that stands in C, where Python runs no handlers, and another one that tells what has come.
STUCK = """
from variable_batch_size.checkpoint.folder import whole
from variable_batch_size.preemption import notice
import ctypes, threading, time
with vbs.Preemption() as preemption:
    def tell():
        while not preemption.requested:
            time.sleep(0.01)
        print(notice(), flush=True)
    threading.Thread(target=tell, daemon=True).start()
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Started ones, which do not outlive the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_a_main_thread_that_stands_in_c_hears_the_first_signal_and_is_ended_by_the_second(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    process = start(STUCK, tmp_path)
    processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert re.fullmatch(r"[01]\.\d\d s after SIGUSR1\n", process.stdout.readline())
    process.send_signal(signal.SIGUSR1)  # the same one, which came by another way
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == EXIT_CODE == 143


def test_outside_of_the_context_signals_are_as_before() -> None:
    before = [signal.getsignal(by) for by in STOPS], signal.set_wakeup_fd(-1)
    with vbs.Preemption() as preemption:
        assert current() is preemption
        assert (preemption.requested, notice()) == (False, "")
        with pytest.raises(RuntimeError, match=r"one Preemption, but .* leave one of them out"), vbs.Preemption():
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(preemption)
        assert notice().endswith("s after SIGUSR1")
    assert ([signal.getsignal(by) for by in STOPS], signal.set_wakeup_fd(-1)) == before
    assert (current(), notice()) == (None, "")
    with preemption:  # again
        assert not preemption.requested


def test_a_process_takes_signals_in_its_main_thread() -> None:
    said = []

    def enter() -> None:
        try:
            with vbs.Preemption():
                pass
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=enter, name="rank 1")
    thread.start()
    thread.join()
    assert said == [
        "a process takes signals in its main thread, but Preemption was entered in rank 1; enter it before the ranks "
        "are launched"
    ]


def test_who_listened_to_signals_before_still_does() -> None:
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


def test_when_somebody_else_begins_to_listen_the_first_signal_is_heard_still() -> None:
    with vbs.Preemption() as preemption:
        assert signal.set_wakeup_fd(-1) != -1
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(preemption)


def test_a_signal_that_nobody_can_take_leaves_nothing_behind() -> None:
    before = [signal.getsignal(by) for by in STOPS], threading.active_count()
    with pytest.raises(OSError, match="Invalid argument"), vbs.Preemption([*STOPS, signal.SIGKILL]):
        pass
    assert ([signal.getsignal(by) for by in STOPS], threading.active_count()) == before
    assert (current(), signal.set_wakeup_fd(-1)) == (None, -1)


def test_nothing_is_launched_after_a_signal() -> None:
    with vbs.Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(preemption)
        with pytest.raises(SystemExit) as end:
            run_by(pytest.fail, print, ())
        assert end.value.code == EXIT_CODE


def test_a_forked_child_has_its_own_signals_and_leaves_those_of_its_parent() -> None:
    with vbs.Preemption() as preemption:
        for by in STOPS:
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
            os.kill(child, by)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -by
        assert not preemption.requested
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(preemption)


def wait_for(preemption: vbs.Preemption) -> None:
    deadline = time.monotonic() + 30
    while not preemption.requested:
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ------------------------------------------------------------------------------------------ what a training makes of it

RANK = """
import torch.distributed as dist
rank = int(sys.argv[2])
with vbs.Preemption():
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
    run = training(sizes=[5, 2, 9], backend=vbs.DistributedBackend())
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
    TensorDataset(run.x, run.target), batch_sampler=run.sampler, num_workers=2, worker_init_fn=vbs.Preemption.shield
)
with vbs.Preemption(), checkpoint(folder / "saved", run) as saves:
    for epoch in range(10**9):
        run.sampler.set_epoch(epoch)
        run.optimizer.set_epoch(epoch)
        for x, target in loader:
            (run.model(x) - target).square().sum(dim=1).mean().backward()
            run.optimizer.step()
            saves.step()
            print("ready", flush=True)
"""
STOPPED = r"stops: (update-\d+) was whole \d+\.\d\d s after (\w+)"


def hear(process: subprocess.Popen[str], said: str) -> None:
    """Wait until it says that; gloo has to say something before."""
    assert process.stdout is not None
    while (line := process.stdout.readline()) != f"{said}\n":
        assert line


def end(process: subprocess.Popen[str]) -> list[str]:
    """The last lines of one that stops as it should."""
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (EXIT_CODE, "")
    return out.splitlines()


def test_all_ranks_stop_after_the_same_update_when_one_is_asked(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    processes += [start(RANK, tmp_path, rank) for rank in range(3)]
    for process in processes:
        hear(process, "ready")
    processes[2].send_signal(signal.SIGUSR1)
    lines = [end(process) for process in processes]
    (updates,) = {int(rank[-1]) for rank in lines}
    said = re.fullmatch(STOPPED, lines[0][-2])
    assert said is not None
    assert said[1] == f"update-{updates:08d}"
    assert said[2] == "SIGUSR1"
    assert whole(tmp_path / "saved" / said[1]) is not None
    assert [len(rank) for rank in lines[1:]] == [1, 1]


def test_a_signal_to_a_whole_group_spares_the_workers_of_the_loader(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    process = start(LOADER, tmp_path, new_session=True)
    processes.append(process)
    hear(process, "ready")
    os.killpg(process.pid, signal.SIGTERM)
    said = re.fullmatch(STOPPED, end(process)[-1])
    assert said is not None
    assert whole(tmp_path / "saved" / said[1]) is not None


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")
@pytest.mark.parametrize(
    "launcher", ["launch(work, args, cores=2)", "run_by(torch_xla.launch, partial(_without_ordinal, work), args)"]
)
def test_a_program_that_launched_cores_stops_with_them(
    launcher: str, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    script = f"""
from functools import partial
import torch_xla
from variable_batch_size.backend._xla_launch import run_by
from variable_batch_size.backend.xla import _without_ordinal, launch
from helpers.xla_checkpoints import Case, train_until_asked as work
args = (folder, Case(vbs.AdaScaleOptimizer, (5, 2, 9), 4))
with vbs.Preemption():
    {launcher}
"""
    process = start(script, tmp_path)
    processes.append(process)
    hear(process, "update 5")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode == EXIT_CODE, err
    said = re.fullmatch(STOPPED, out.splitlines()[-1])
    assert said is not None
    assert whole(tmp_path / "checkpoints" / said[1]) is not None
    stood = {f"update-{int(path.read_text()):08d}" for path in tmp_path.glob("stood*")}
    assert stood == {said[1]}
