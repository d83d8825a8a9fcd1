"""Real signals to real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import start

import variable_batch_size as vbs
from variable_batch_size.preemption import EXIT_CODE, current

STOPS = [signal.SIGTERM, signal.SIGUSR1]

# A main thread that stands in C, where Python runs no handlers, and another one that tells what has come.
STUCK = """
import ctypes, threading, time
with vbs.Preemption() as preemption:
    def tell():
        while not preemption.requested:
            time.sleep(0.01)
        print(preemption.name, preemption.seconds < 5, flush=True)
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
    assert process.stdout.readline() == "SIGUSR1 True\n"
    process.send_signal(signal.SIGUSR1)  # the same one, which came by another way
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == EXIT_CODE == 143


def test_outside_of_the_context_signals_are_as_before() -> None:
    before = [signal.getsignal(by) for by in STOPS], signal.set_wakeup_fd(-1)
    with vbs.Preemption() as preemption:
        assert current() is preemption
        assert not preemption.requested
        with pytest.raises(RuntimeError, match=r"one Preemption, but .* leave one of them out"), vbs.Preemption():
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(preemption)
        assert preemption.name == "SIGUSR1"
    assert ([signal.getsignal(by) for by in STOPS], signal.set_wakeup_fd(-1)) == before
    assert current() is None
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


def test_a_forked_child_has_its_own_signals() -> None:
    with vbs.Preemption() as preemption:
        for by in STOPS:
            if (child := os.fork()) == 0:
                try:
                    time.sleep(100)
                finally:
                    os._exit(0)
            time.sleep(0.1)
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
