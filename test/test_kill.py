"""A training that is killed at any instant goes on exactly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from killed_training import Run
from kills import Campaign

SEED = 11
RUN = Run("RootRuleOptimizer", "Adam", (20, 7, 1, 33, 12, 50, 3, 5), 101, seed=SEED, every=3, numbers=1_000_000)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


def test_workers_that_are_killed_go_on_exactly(tmp_path: Path) -> None:
    print("seed", SEED)
    campaign = Campaign(RUN, tmp_path, SEED, minibatch_sizes=(3, 4, 5))
    for world, ending, phase in [
        (1, "all", "training"),
        (4, "a worker", "saved"),
        (2, "torchrun", "training"),
        (1, "all", "restore"),
        (1, "all", "saved"),
    ]:
        print(campaign.kill(world, ending, phase))
    campaign.finish(2)


def test_workers_that_are_asked_to_stop_lose_nothing(tmp_path: Path) -> None:
    print("seed", SEED)
    campaign = Campaign(RUN, tmp_path, SEED, minibatch_sizes=(3, 4, 5))
    for world, ending, phase in [
        (2, "SIGTERM to a worker", "training"),
        (1, "SIGUSR1 to a worker", "restore"),
        (4, "SIGTERM to all", "training"),
        (3, "SIGTERM", "training"),
        (2, "SIGUSR1 to a worker", "training"),
    ]:
        print(campaign.kill(world, ending, phase))
    campaign.finish(1)


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_cores_that_are_killed_go_on_exactly(tmp_path: Path) -> None:
    print("seed", SEED)
    campaign = Campaign(RUN, tmp_path, SEED, by="cores", minibatch_sizes=(3, 4, 5))
    for world, ending in [(2, "a worker"), (4, "the launcher"), (3, "SIGTERM"), (1, "all")]:
        print(campaign.kill(world, ending, "saved"))
    campaign.finish(1)
