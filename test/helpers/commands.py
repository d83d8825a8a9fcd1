"""Running the commands of the pages: with the programs of this Python environment, from any folder."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from helpers.pages import ROOT

TIMEOUT = 300.0  # seconds


def environment(path: object = "", **variables: str) -> dict[str, str]:
    """Return the variables of a command: `path` and then this environment's programs come first on PATH."""
    folders = [str(path), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {**os.environ, "PATH": os.pathsep.join(filter(None, folders)), **variables}


def run(*command: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, check=False)


def free_port() -> int:
    """Return the number of a port that is free now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port


def free_job() -> int:
    """Return the number of a job of Slurm for which train.slurm computes a port that is free now."""
    while True:
        job = random.randrange(1, 20_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("localhost", 20_000 + job))
            return job


def wait_for(condition: Callable[[], object], logs: Callable[[], str]) -> None:
    """Wait until a condition holds; an error shows the logs."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, logs()
        time.sleep(0.05)


def saved(checkpoints: Path) -> int:
    """Return the update of the newest checkpoint in a folder, 0 if there is none."""
    return max((int(path.parent.name[7:15]) for path in checkpoints.glob("update-*/rank-0.json")), default=0)
