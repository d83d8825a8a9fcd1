"""Odd loops with sums that leave during `backward()`, in real gloo processes: the same updates as without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.processes import spawn
from helpers.reduction_jobs import SECONDS, WORLDS, alone, saved
from helpers.reduction_loops import LOOPS, one_rank_returns, run_loops
from helpers.reference import assert_equal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loops")
    spawn(run_loops, (folder,), nprocs=max(WORLDS))
    return folder


@pytest.fixture(params=WORLDS, ids="world {}".format)
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    """Return the results of every rank."""
    return saved(folder, request.param)


@pytest.mark.parametrize("name", [loop.__name__ for loop in LOOPS])
def test_a_loop_makes_the_updates_without_overlap(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_equal(rank[name][True], rank[name][False])
        assert_equal(rank[name][True], ranks[0][name][True], 0)


def test_optimizers_that_follow_one_another_share_process_groups(folder: Path) -> None:
    for rank in saved(folder, 2):
        first, *_, last = rank["recreated"]
        for few, many in zip(first, last, strict=True):
            assert many < few + 30  # 15 process groups would have 45 threads and 90 sockets


def test_the_checks_of_torch_distributed_are_content(folder: Path) -> None:
    expected = alone()
    for rank in range(2):
        assert_equal(torch.load(folder / f"detail-rank{rank}.pt", weights_only=False), expected)


def test_a_rank_that_returns_from_its_script_within_a_step_ends_well_and_the_others_are_told(tmp_path: Path) -> None:
    begin = time.monotonic()
    spawn(one_rank_returns, (tmp_path,), nprocs=2)  # raises if an exit code is not 0
    assert time.monotonic() - begin < SECONDS
    assert "restart all ranks from the last checkpoint" in (tmp_path / "error").read_text()
