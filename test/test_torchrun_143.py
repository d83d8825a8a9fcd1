"""examples/clusters/torchrun_143.py: its exit codes, and that a signal ends it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from helpers.commands import TIMEOUT, free_port, saved, wait_for
from helpers.jobs import SHORT, STOPPED, assert_saved_and_resumed, children, logs, place, start, started
from helpers.kills import send
from helpers.pages import DOCS, commands

__all__ = ["place", "started"]


def torchrun(place, script, *flags):
    (place / "script.py").write_text(script)
    command = [sys.executable, "examples/clusters/torchrun_143.py", *(flags or ["--standalone"]), "script.py"]
    return start(command, place, "log")


@pytest.mark.slow("starts torchrun")
@pytest.mark.torch
def test_torchrun_exits_at_once_while_it_waits_for_another_host(place, started):
    port = free_port()
    running = torchrun(place, "", "--nnodes=2", "--node-rank=0", "--master-addr=localhost", f"--master-port={port}")
    started.append(running)
    listens = f":{port:04X} "  # then its main thread waits in C++ for the other host, for minutes
    wait_for(lambda: listens in "".join(map(Path.read_text, Path("/proc/net").glob("tcp*"))), lambda: logs(place))
    running.terminate()
    assert running.wait(10) == STOPPED, logs(place)


@pytest.mark.slow("restarts jobs")
@pytest.mark.torch
def test_torchrun_exits_with_143_after_sigusr1(place, started):
    running = torchrun(place, "import time; print('ready', flush=True); time.sleep(100)")
    started.append(running)
    wait_for(lambda: "ready" in logs(place), lambda: logs(place))
    running.send_signal(signal.SIGUSR1)
    assert running.wait(TIMEOUT) == STOPPED, logs(place)


@pytest.mark.nightly("restarts jobs")
@pytest.mark.torch
def test_the_shell_loop_of_the_page_resumes(place, started):
    (line,) = (line for line in commands(DOCS / "clusters.md") if "torchrun_143" in line)
    line = line.replace("--nproc-per-node=8", "--standalone --nproc-per-node=2")
    flags = place / "flags"
    flags.touch()
    running = start(["bash", "-c", line.replace("runs/a", "checkpoints/a $(cat flags)")], place, "log")
    started.append(running)
    wait_for(lambda: saved(place / "checkpoints/a"), lambda: logs(place))
    flags.write_text(SHORT)
    send(signal.SIGTERM, children(running.pid))
    assert running.wait(TIMEOUT) == 0, logs(place)
    assert_saved_and_resumed(place)


@pytest.mark.slow("starts torchrun")
@pytest.mark.parametrize(("code", "expected"), [(STOPPED, STOPPED), (21, 1), (0, 0)])
def test_torchrun_exits_with_143_only_if_its_workers_do(place, code, expected):
    assert torchrun(place, f"import sys; sys.exit({code})").wait(TIMEOUT) == expected, logs(place)
    assert ("Traceback" in logs(place)) == (expected == 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_torchrun_handles_a_signal_while_it_is_imported(place, number):
    (place / "torch.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    running = start([sys.executable, "examples/clusters/torchrun_143.py"], place, "log", PYTHONPATH=str(place))
    assert running.wait(TIMEOUT) == STOPPED, logs(place)
