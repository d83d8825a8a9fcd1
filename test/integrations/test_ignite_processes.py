"""Ignite on two processes, and resumes on another number of them."""

from __future__ import annotations

from pathlib import Path

from helpers import ignite_jobs as jobs
from helpers.trainer_cases import Case
from helpers.yardstick import in_processes


def test_two_processes(tmp_path: Path) -> None:
    jobs.Script(Case()).saving(tmp_path / "one").run()
    in_processes(jobs.two_processes, 2, tmp_path)
    for script in jobs.resumed(Case(), tmp_path / "two"):
        jobs.check(script)
