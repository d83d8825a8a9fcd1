"""What the README says of machines that come and go: its own commands, while processes are taken away and added."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.kills import send
from helpers.readme import ROOT, commands

LINES = [line for line in commands() if "--checkpoint" in line]
PATIENCE = 300.0  # seconds
SHORT = "--samples 12000 --trace 0:200 --microbatch 50 --target 0.5 --save-every 5"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Leaders of sessions, which end with the test and take all with them that they have started."""
    leaders: list[subprocess.Popen[bytes]] = []
    yield leaders
    for leader in leaders:
        send(signal.SIGKILL, [*descendants(leader.pid), leader.pid])
        leader.wait()


def start(line: str, log: Path, path: str = "") -> subprocess.Popen[bytes]:
    search = os.pathsep.join([path, str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": search, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.xla
def test_a_loop_goes_on_with_other_cores(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    nproc = tmp_path / "bin" / "nproc"
    nproc.parent.mkdir()
    nproc.write_text(f"#!/bin/sh\n[ -e {tmp_path}/asked ] && echo 1 || echo 2\ntouch {tmp_path}/asked\n")
    nproc.chmod(0o755)
    line = LINES[0].replace("runs/a", f"{tmp_path}/saved --logdir {tmp_path}/log --num-workers 1 --epochs 1 {SHORT}")
    loop = start(line, tmp_path / "said", str(nproc.parent))
    started.append(loop)
    wait_for(lambda: saved(tmp_path) >= 10, tmp_path)
    program = min(descendants(loop.pid))  # bash's own child
    os.kill(program, signal.SIGTERM)
    assert loop.wait(PATIENCE) == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    assert re.findall(r"^(\d) x xla", said, re.MULTILINE) == ["2", "1"]
    assert "Warning" not in said
    assert re.search(r"^stops: update-\d+ was whole \d+\.\d\d s after SIGTERM$", said, re.MULTILINE)
    assert re.search(r"^samples +12,000$", said, re.MULTILINE)


def test_torchrun_goes_on_when_a_machine_joins_and_when_it_is_lost(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    line = LINES[1].replace("runs/a", f"{tmp_path}/saved --epochs 2 {SHORT}").replace("29400", str(port))
    line = line.replace("last_call_timeout=5", "last_call_timeout=1,keep_alive_interval=1")
    line = line.replace("--nproc-per-node=2", "--nproc-per-node=1 --monitor-interval=0.1")
    logs = tmp_path / "first", tmp_path / "second"

    def worlds() -> list[str]:
        return re.findall(r"^(\d) x cpu", "".join(log.read_text() for log in logs if log.exists()), re.MULTILINE)

    first = start(line, logs[0])
    started.append(first)
    wait_for(lambda: saved(tmp_path) >= 5, tmp_path)
    second = start(line, logs[1])
    started.append(second)
    wait_for(lambda: worlds() == ["1", "2"], tmp_path)
    before = saved(tmp_path)
    wait_for(lambda: saved(tmp_path) > before, tmp_path)
    send(signal.SIGKILL, [*descendants(second.pid), second.pid])
    assert first.wait(PATIENCE) == 0, logs[0].read_text()
    assert worlds() == ["1", "2", "1"]
    said = logs[0].read_text()
    assert "after SIGTERM" in said + logs[1].read_text()  # when the second one joined, nothing was lost
    assert re.search(r"^samples +24,000$", said, re.MULTILINE)


def saved(folder: Path) -> int:
    """The update of the newest checkpoint."""
    return max((int(path.name[7:15]) for path in folder.glob("saved/update-*")), default=0)


def wait_for(met: object, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not met():  # type: ignore[operator]
        logs = "\n".join(path.read_text(errors="replace") for path in folder.iterdir() if path.is_file())
        assert time.monotonic() < deadline, logs
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """Of a process, whatever sessions they are in."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            child, parent = stat.read_text().rpartition(")")[::2]
        except OSError:
            continue
        parents.setdefault(int(parent.split()[1]), []).append(int(child.split()[0]))
    children = parents.get(pid, [])
    return children + [later for child in children for later in descendants(child)]
