"""Accelerate on two processes, and resumes on another number of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import accelerate_jobs as jobs
from helpers.trainer_cases import Case
from helpers.yardstick import in_processes

pytestmark = pytest.mark.usefixtures("new_state")


def test_two_processes(tmp_path: Path) -> None:
    jobs.trained(Case()).run(jobs.at(tmp_path / "one"))
    in_processes(jobs.two_processes, 2, tmp_path)
    for _, loop in jobs.resumed(Case(), tmp_path / "two"):
        jobs.check(loop)
