"""Ranks that get shares by their speed make the updates of one process, whatever sums the gradients."""

from __future__ import annotations

from typing import Any

import pytest

import variable_batch_size as vbs
from helpers.processes import run_job
from helpers.reference import assert_equal, training, twin
from helpers.speed_jobs import ODD, WAYS, run_scenarios


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_job("gloo", run_scenarios, ranks=2)


@pytest.mark.parametrize("way", WAYS)
def test_the_updates_are_those_of_whole_batches(way: str, ranks: list[dict[str, Any]]) -> None:
    alone = training(vbs.AdaScaleOptimizer, ODD).run(len(ODD))
    for rank in ranks:
        found = rank[way]["weights"]
        assert_equal(found["LinearRuleOptimizer"], twin(vbs.LinearRuleOptimizer, ODD))
        assert_equal(found["equal rounds"], twin(vbs.LinearRuleOptimizer, (30, 23)))
        assert_equal(found["AdaScaleOptimizer"], alone.weights())


@pytest.mark.parametrize("way", WAYS)
def test_the_fast_rank_gets_three_quarters(way: str, ranks: list[dict[str, Any]]) -> None:
    fast, slow = (rank[way]["counted"] for rank in ranks)
    shares = [(sum(one), sum(other)) for one, other in zip(fast, slow, strict=True)]
    assert [sum(share) for share in shares] == [9, 4, 17, 1, 12, 3, 2, 2]  # an epoch has 50 samples
    assert shares == [(7, 2), (3, 1), (13, 4), (1, 0), (9, 3), (3, 0), (2, 0), (2, 0)]
    rounds = [(len(one), len(other)) for one, other in zip(fast, slow, strict=True)]
    if way == "fsdp2":  # whose ranks gather the parameters together
        assert all(one == other for one, other in rounds)
        assert (slow[0], fast[2], slow[2]) == ([1, 1], [3, 3, 3, 4], [1, 1, 1, 1])
    else:
        assert rounds == [(2, 1), (1, 1), (4, 1), (1, 1), (3, 1), (1, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_resumes_with_other_speeds(way: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_equal(rank[way]["resumed"], twin(vbs.LinearRuleOptimizer, ODD))


def test_ranks_must_agree_on_speeds(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (
            "the same speeds, but it is [1, 3] on rank 0 and [3, 1] on rank 1; pass the same value" in rank["unequal"]
        )
