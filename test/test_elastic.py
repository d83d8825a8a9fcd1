"""The commands of checkpoints.md and clusters.md for elastic training, while processes are removed and added."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from helpers.commands import TIMEOUT, environment, free_port, saved, wait_for
from helpers.kills import send
from helpers.pages import DOCS, ROOT, commands

(LOOP,) = (line for line in commands(DOCS / "checkpoints.md") if "--cores" in line)
(ELASTIC,) = (line for line in commands(DOCS / "clusters.md") if "--nnodes=1:4" in line and "mnist" in line)
SHORT = "--samples 12000 --trace 0:200 --microbatch 50 --target 0.5 --save-every 5"


@pytest.fixture
def started():
    """Leaders of sessions; each ends with the test, together with its descendants."""
    leaders = []
    yield leaders
    for leader in leaders:
        send(signal.SIGKILL, [*descendants(leader.pid), leader.pid])
        leader.wait()


def start(line, log, path=""):
    """Run a line of shell; `path` comes first on PATH."""
    with log.open("wb") as file:
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=ROOT,
            env=environment(path, OMP_NUM_THREADS="1"),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.nightly("starts XLA twice")
@pytest.mark.xla
def test_a_shell_loop_resumes_with_another_number_of_cores(tmp_path, started):
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    nproc = tmp_path / "bin" / "nproc"
    nproc.parent.mkdir()
    nproc.write_text(f"#!/bin/sh\n[ -e {tmp_path}/called ] && echo 1 || echo 2\ntouch {tmp_path}/called\n")
    nproc.chmod(0o755)
    line = LOOP.replace("runs/a", f"{tmp_path}/saved --logdir {tmp_path}/log --num-workers 1 --epochs 1 {SHORT}")
    loop = start(line, tmp_path / "output", str(nproc.parent))
    started.append(loop)
    wait_for(lambda: saved(tmp_path / "saved") >= 10, output_in(tmp_path))
    program = descendants(loop.pid)[0]  # bash's own child
    os.kill(program, signal.SIGTERM)
    assert loop.wait(TIMEOUT) == 0, (tmp_path / "output").read_text()
    output = (tmp_path / "output").read_text()
    assert re.findall(r"^(\d) x xla", output, re.MULTILINE) == ["2", "1"]
    assert "Warning" not in output
    assert re.search(
        r"Checkpoint update-\S+ saved \d+\.\d\d s after SIGTERM; exiting with 143\.$", output, re.MULTILINE
    )
    assert re.search(r"^samples +12,000$", output, re.MULTILINE)


@pytest.mark.slow("restarts torchrun")
def test_torchrun_continues_when_a_machine_joins_and_when_it_is_lost(tmp_path, started):
    line = ELASTIC.replace("runs/a", f"{tmp_path}/saved --epochs 2 {SHORT}").replace("29400", str(free_port()))
    line = line.replace("last_call_timeout=5", "last_call_timeout=1,keep_alive_interval=1")
    line = line.replace("--nproc-per-node=2", "--nproc-per-node=1 --monitor-interval=0.1")
    logs = tmp_path / "first", tmp_path / "second"

    def worlds():  # rank 0 prints it, which torchrun places on the machine whose agent has the smallest process id
        return re.findall(r"^(\d) x cpu", "".join(log.read_text() for log in logs if log.exists()), re.MULTILINE)

    first = start(line, logs[0])
    started.append(first)
    wait_for(lambda: saved(tmp_path / "saved") >= 5, output_in(tmp_path))
    second = start(line, logs[1])
    started.append(second)
    wait_for(lambda: worlds() == ["1", "2"], output_in(tmp_path))
    before = saved(tmp_path / "saved")
    wait_for(lambda: saved(tmp_path / "saved") > before, output_in(tmp_path))
    send(signal.SIGKILL, [*descendants(second.pid), second.pid])
    assert first.wait(TIMEOUT) == 0, logs[0].read_text()
    assert sorted(worlds()) == ["1", "1", "2"]
    output = logs[0].read_text()
    assert "after SIGTERM" in output + logs[1].read_text()  # no update was lost when the second one joined
    assert re.search(r"^samples +24,000$", output, re.MULTILINE)


def output_in(folder):
    """Return a function that reads the files in a folder."""
    return lambda: "\n".join(path.read_text(errors="replace") for path in folder.iterdir() if path.is_file())


def descendants(pid):
    """Return the descendants of a process, in any session, its own children first."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            child, parent = stat.read_text().rpartition(")")[::2]
        except OSError:
            continue
        parents.setdefault(int(parent.split()[1]), []).append(int(child.split()[0]))
    children = parents.get(pid, [])
    return children + [later for child in children for later in descendants(child)]
