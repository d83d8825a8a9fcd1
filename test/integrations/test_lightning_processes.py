"""The yardstick with Lightning on several processes, by DDP and FSDP2, and from one number of them to another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.lightning_gan import gan_job
from helpers.lightning_jobs import (
    ALLOWED,
    KINDS,
    float16_job,
    quieten,
    resume_job,
    save_job,
    several_job,
    yardstick_job,
)
from helpers.lightning_metrics import exception_job, metrics_job
from helpers.yardstick import STOPS, in_processes

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in ALLOWED]

SCRIPT = """
import warnings
from pathlib import Path

from helpers.lightning_jobs import Classifier, difference, expected, fit, quieten

if __name__ == "__main__":
    quieten()
    warnings.filterwarnings("ignore", "Starting from v1.9.0")
    module = Classifier()
    run = fit(module, devices=2)
    assert run.world_size == 2
    assert difference(module.net, expected()) < 1e-12
    Path(f"{run.global_rank}.steps").write_text(str(run.global_step))
"""


def _on_one(folder: Path) -> None:
    quieten()
    yardstick_job("fsdp2")


def _on_two(folder: Path, one: Path) -> None:
    quieten()
    for kind in KINDS:
        yardstick_job(kind)
        for name in f"{kind} plain", f"{kind} dropout":
            save_job(folder, name, kind)
            resume_job(folder, name, STOPS, 0.0, kind)
    save_job(folder, "one file", "fsdp2", save_distributed_checkpoint=False)
    resume_job(one, "plain", STOPS, 1e-12)
    resume_job(one, "plain", STOPS[2:3], 1e-12, "fsdp2")
    several_job()
    float16_job()
    gan_job(folder)
    metrics_job(folder)
    exception_job(folder)


def _on_three(folder: Path, two: Path) -> None:
    quieten()
    for kind in KINDS:
        yardstick_job(kind)
        resume_job(two, f"{kind} plain", STOPS[1:4], 1e-12, kind)
    save_job(folder, "ddp")
    save_job(folder, "fsdp2", "fsdp2", save_distributed_checkpoint=False)
    resume_job(two, "one file", STOPS[2:3], 1e-12, "fsdp2")


@pytest.mark.parametrize("largest", [2, pytest.param(3, marks=pytest.mark.nightly("starts three processes"))])
def test_numbers_of_processes(largest: int, tmp_path: Path) -> None:
    one, two, three = tmp_path / "one", tmp_path / "two", tmp_path / "three"
    save_job(one, "plain")
    in_processes(_on_two, 2, two, one)
    assert sorted(path.name for path in two.glob("told *")) == ["told 0", "told 1"]
    resume_job(two, "ddp plain", STOPS, 1e-12)
    if largest == 3:
        in_processes(_on_three, 3, three, two)
        for name in ("ddp", "fsdp2"):
            resume_job(three, name, STOPS, 1e-12)


def test_one_process_with_fsdp2(tmp_path: Path) -> None:
    in_processes(_on_one, 1, tmp_path)


def test_lightning_starts_the_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # the script imports this test's helpers
    found = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert {path.name: path.read_text() for path in tmp_path.glob("*.steps")} == {"0.steps": "26", "1.steps": "26"}
