"""The yardstick with Lightning on two processes, and from two to one and one to two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.lightning_gan import gan_job
from helpers.lightning_jobs import (
    ALLOWED,
    resume_job,
    save_job,
    several_job,
    yardstick_job,
)
from helpers.lightning_metrics import exception_job, metrics_job
from helpers.yardstick import STOPS, in_processes

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in ALLOWED]

SCRIPT = """
import os
import warnings

from helpers.lightning_jobs import Classifier, expected, fit, quieten
from helpers.yardstick import difference

if __name__ == "__main__":
    quieten()
    warnings.filterwarnings("ignore", "Starting from v1.9.0")
    module = Classifier()
    run = fit(module, devices=2)
    assert run.world_size == 2
    assert difference(module.net, expected()) < 1e-12
    os.write(1, f"trained {run.global_rank} {run.global_step}\\n".encode())  # at once: two processes share the pipe
"""


def _on_two(folder: Path, alone: Path) -> None:
    yardstick_job(folder)
    for name in "plain", "dropout":
        save_job(folder, name)
        resume_job(folder, name, STOPS, 0.0)
    resume_job(alone, "plain", STOPS, 1e-12)
    several_job(folder)
    gan_job(folder)
    metrics_job(folder)
    exception_job(folder)


def test_two_processes_and_other_numbers_of_them(tmp_path: Path) -> None:
    save_job(tmp_path / "one", "plain")
    in_processes(_on_two, 2, tmp_path / "two", tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "two").glob("told *")) == ["told 0", "told 1"]
    resume_job(tmp_path / "two", "plain", STOPS, 1e-12)


def test_lightning_starts_the_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # the script imports this test's helpers
    found = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    assert sorted(line for line in found.stdout.splitlines() if line.startswith("trained")) == [
        "trained 0 26",
        "trained 1 26",
    ]
