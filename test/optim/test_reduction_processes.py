"""Gradients that are summed in buckets while `backward()` runs, in real gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.processes import spawn
from helpers.reduction_jobs import UPDATES, WORLDS, alone, deep, one_rank_ends, run_scenarios, saved
from helpers.reference import assert_equal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overlap")
    spawn(run_scenarios, (folder,), nprocs=max(WORLDS))
    return folder


@pytest.fixture(params=WORLDS, ids="world {}".format)
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    """Return the results of every rank."""
    return saved(folder, request.param)


@pytest.mark.slow("starts processes in several worlds")
@pytest.mark.torch
def test_buckets_leave_before_the_last_backward_of_a_rank_returns(ranks: list[dict[str, Any]]) -> None:
    buckets = len(list(deep().parameters()))
    for rank in ranks:
        _, *updates = rank["order"]
        assert len(updates) == UPDATES - 1
        for events in updates:
            assert events[-2:] == ["backward", "sum"]  # the message with everything else
            assert events[-2 - buckets : -2] == ["sum"] * buckets
            assert set(events[: -2 - buckets]) <= {"backward"}


def test_the_results_are_those_without_overlap_and_to_the_bit_those_of_another_run(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["weights"]
        assert_equal(found["False"], alone())
        assert_equal(found["True"], found["False"])
        for other in ("again", "resumed 1", "resumed 3"):
            assert_equal(found[other], found["True"], 0)
            assert_equal(found[other], ranks[0]["weights"]["True"], 0)


def test_a_step_that_all_ranks_or_one_discard_in_a_backward_starts_over(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for found in rank["discarded"].values():
            assert_equal(found, rank["weights"]["True"], 0)


def test_gradients_that_zero_grad_drops_have_no_effect_although_they_have_left(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_equal(rank["strays"], alone())


def test_two_backwards_per_microbatch_are_exact_from_the_start_and_raise_later(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        weights, message = rank["second_backward"]
        assert len(weights) == len(alone())
        assert "came again after it was sent to the other ranks; pass overlap=False to the optimizer" in message


def test_the_ordinary_loop_of_a_gan_makes_the_updates_without_overlap(ranks: list[dict[str, Any]]) -> None:
    """The generator's backward comes to parameters of the discriminator, whose sums then leave too early."""
    for rank in ranks:
        for found in rank["gans"].values():
            assert_equal(found, rank["gans"]["without overlap"])


def test_what_a_dropped_optimizer_has_sent_does_not_reach_another_one(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for found in rank["dropped"]:
            assert_equal(found, rank["weights"]["True"], 0)


def test_the_error_after_the_end_of_a_rank_says_that_the_world_has_to_restart(tmp_path: Path) -> None:
    spawn(one_rank_ends, (tmp_path,), nprocs=2)
    assert "restart all ranks from the last checkpoint" in (tmp_path / "error").read_text()
