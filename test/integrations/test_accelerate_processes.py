"""Accelerate on one to three processes, in DistributedDataParallel and with FSDP2, and resumes on another number."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import accelerate_jobs as jobs
from helpers.trainer_cases import CASES, Case
from helpers.yardstick import in_processes

pytestmark = pytest.mark.usefixtures("new_state")


def test_two_processes(tmp_path: Path) -> None:
    jobs.trained(Case()).run(jobs.at(tmp_path / "one"))
    in_processes(jobs.two_processes, 2, tmp_path)
    for _, loop in jobs.resumed(Case(), tmp_path / "two"):
        jobs.check(loop)


def three_processes(folder: Path, saved: Path) -> None:
    """The cases, and what two processes have saved."""
    for case in CASES:
        jobs.check(jobs.trained(case).run())
    for _, loop in jobs.resumed(Case(), saved):
        jobs.check(loop)


def test_three_processes(tmp_path: Path) -> None:
    in_processes(save_two, 2, tmp_path / "two")
    in_processes(three_processes, 3, tmp_path / "three", tmp_path / "two")


def save_two(folder: Path) -> None:
    """Save states."""
    jobs.trained(Case()).run(jobs.at(folder))


@pytest.mark.parametrize(
    ("world", "other"),
    [(2, 3), *(pytest.param(*two, marks=pytest.mark.nightly("starts processes")) for two in ((1, 2), (3, 1)))],
)
def test_sharded(tmp_path: Path, world: int, other: int) -> None:
    in_processes(jobs.sharded, world, tmp_path / "saved")
    in_processes(jobs.resume_sharded, other, tmp_path / "again", tmp_path / "saved")
