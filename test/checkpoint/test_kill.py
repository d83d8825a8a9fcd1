"""A training that is killed at any instant resumes exactly."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from helpers.killed_training import KilledTraining
from helpers.kills import Campaign

SEED = 11
RUN = KilledTraining(
    kind="RootRuleOptimizer",
    inner="Adam",
    sizes=(20, 7, 1, 33, 12, 50, 3, 5),
    dataset_size=101,
    seed=SEED,
    every=3,
    numbers=1_000_000,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


def run_campaign(endings, last_world, folder, by="torchrun"):
    """End a training once per (world size, ending, phase), and let it finish in a world of size `last_world`."""
    print("seed", SEED)
    campaign = Campaign(RUN, folder, SEED, by=by, minibatch_sizes=(3, 4, 5))
    for world, ending, phase in endings:
        print(campaign.kill(world, ending, phase))
    campaign.finish(last_world)


@pytest.mark.slow("starts torchrun")
def test_a_killed_worker_ends_the_others_and_all_resume_exactly(tmp_path):
    run_campaign([(2, "a worker", "saved")], last_world=1, folder=tmp_path)


@pytest.mark.nightly("starts torchrun four times")
@pytest.mark.torch
def test_killed_workers_resume_exactly(tmp_path):
    endings = [(4, "a worker", "saved"), (2, "torchrun", "training"), (1, "all", "restore")]
    run_campaign(endings, last_world=2, folder=tmp_path)


@pytest.mark.nightly("starts torchrun four times")
def test_workers_that_are_asked_to_stop_lose_no_update(tmp_path):
    endings = [(1, "SIGUSR1 to a worker", "restore"), (2, "SIGTERM to all", "training"), (3, "SIGTERM", "training")]
    run_campaign(endings, last_world=1, folder=tmp_path)


@pytest.mark.nightly("starts XLA three times")
@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_killed_cores_resume_exactly(tmp_path):
    endings = [(4, "the launcher"), (3, "SIGTERM")]
    run_campaign([(world, ending, "saved") for world, ending in endings], last_world=1, folder=tmp_path, by="cores")
