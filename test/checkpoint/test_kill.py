"""A training that is killed at any instant goes on exactly."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.killed_training import Run
from helpers.kills import Campaign

SEED = 11
RUN = Run("RootRuleOptimizer", "Adam", (20, 7, 1, 33, 12, 50, 3, 5), 101, seed=SEED, every=3, numbers=1_000_000)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


def go_through(endings: Sequence[tuple[int, str, str]], last_world: int, folder: Path, by: str = "torchrun") -> None:
    """End a training so, each time in a world of that size and in that phase; it finishes in one of the last size."""
    print("seed", SEED)
    campaign = Campaign(RUN, folder, SEED, by=by, minibatch_sizes=(3, 4, 5))
    for world, ending, phase in endings:
        print(campaign.kill(world, ending, phase))
    campaign.finish(last_world)


def test_workers_that_are_killed_go_on_exactly(tmp_path: Path) -> None:
    endings = [
        (1, "all", "training"),
        (4, "a worker", "saved"),
        (2, "torchrun", "training"),
        (1, "all", "restore"),
        (1, "all", "saved"),
    ]
    go_through(endings, 2, tmp_path)


def test_workers_that_are_asked_to_stop_lose_nothing(tmp_path: Path) -> None:
    endings = [
        (2, "SIGTERM to a worker", "training"),
        (1, "SIGUSR1 to a worker", "restore"),
        (4, "SIGTERM to all", "training"),
        (3, "SIGTERM", "training"),
        (2, "SIGUSR1 to a worker", "training"),
    ]
    go_through(endings, 1, tmp_path)


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_cores_that_are_killed_go_on_exactly(tmp_path: Path) -> None:
    endings = [(2, "a worker"), (4, "the launcher"), (3, "SIGTERM"), (1, "all")]
    go_through([(world, ending, "saved") for world, ending in endings], 1, tmp_path, by="cores")
