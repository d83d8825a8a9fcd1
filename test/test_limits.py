"""The limit of a test's time counts all processes."""

from __future__ import annotations

import time

from helpers import limits
from helpers.processes import Forked, spawn


def work(rank: int) -> None:
    while time.process_time() < 0.1:
        pass


def test_the_time_of_forked_processes_counts() -> None:
    began = limits._seconds()
    spawn(work, (), 2)
    assert Forked(work, 0).wait() == 0
    assert limits._seconds() - began > 3 * 0.08  # the kernel counts hundredths
