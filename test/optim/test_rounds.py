"""Rounds of sums: those that some ranks have begun, and sums that have failed, when a state is loaded."""

from __future__ import annotations

import copy

import pytest

import variable_batch_size as vbs
from helpers.reference import SIZES, Training, assert_equal, training, twin
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks

UPDATES = 6


def restore(run: Training, state: tuple[object, object]) -> Training:
    model, optimizer = copy.deepcopy(state)
    run.model.load_state_dict(model)  # type: ignore[arg-type]
    run.optimizer.load_state_dict(optimizer)  # type: ignore[arg-type]
    return run


class Failed:
    """A sum in which another rank has not taken part."""

    def wait(self) -> None:
        raise RuntimeError("timed out")


@pytest.mark.parametrize("order", [True, False], ids="order {}".format)
def test_after_a_failed_sum_of_one_rank_all_ranks_can_go_on_from_a_state(order: bool) -> None:
    def train(backend: Backend) -> Training:
        run = training(backend=backend)
        states = [copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))]
        run.run(2)
        states.append(copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict())))
        if backend.world.rank == 0:
            run.optimizer._updater.gradient._rounds._under_way = [Failed()]
            with pytest.raises(
                RuntimeError, match="restart all ranks from the last checkpoint, or restore it on every"
            ):
                run.run(1)
        return restore(run, states[order]).run(UPDATES - 2 * order)

    for run in run_ranks(train, 2):
        assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:UPDATES]))


@pytest.mark.parametrize("order", [True, False], ids="order {}".format)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_state_is_loaded_when_one_rank_has_begun_a_round(order: bool, ahead: int) -> None:
    """The other rank completes the round, although the buckets of the loaded state may be others."""

    def train(backend: Backend) -> Training:
        run = training(backend=backend)
        states = [copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))]
        run.run(2)
        states.append(copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict())))
        rounds = run.optimizer._updater.gradient._rounds
        if backend.world.rank == ahead:
            rounds._send_zeros(rounds._message)  # type: ignore[arg-type]
        restore(run, states[order]).run(UPDATES - 2 * order)
        assert not rounds._under_way
        return run

    for run in run_ranks(train, 2):
        assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:UPDATES]))
