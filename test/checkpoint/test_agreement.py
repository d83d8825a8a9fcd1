"""All ranks return the same or raise the same error, also that of a write in a thread of one of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import checkpoint, names
from helpers.properties import examples
from helpers.reference import training
from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint.agreement import Agreement
from variable_batch_size.testing import run_ranks

outcomes = st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=40)), min_size=1, max_size=4)


def result(outcome: bytes | str | bool) -> Any:
    if isinstance(outcome, str):
        raise KeyError(outcome)
    return outcome


def caught(call: Any, work: Any) -> Any:
    try:
        return call(work)
    except RuntimeError as error:
        return str(error)


@examples(60)
@given(outcomes)
def test_every_rank_returns_the_results_of_all_or_raises_the_first_error(outcomes: list[bytes | str]) -> None:
    def run(backend: Backend) -> Any:
        return caught(Agreement(backend).on_every_rank, partial(result, outcomes[backend.world.rank]))

    errors = [str(KeyError(outcome)) for outcome in outcomes if isinstance(outcome, str)]
    expected = errors[0] if errors else outcomes
    assert run_ranks(run, len(outcomes)) == len(outcomes) * [expected]


@examples(30)
@given(st.lists(st.one_of(st.booleans(), st.just("error")), min_size=1, max_size=4))
def test_a_condition_is_true_everywhere_if_it_is_on_one_rank(conditions: list[bool | str]) -> None:
    def run(backend: Backend) -> Any:
        return caught(Agreement(backend).any_rank, partial(result, conditions[backend.world.rank]))

    expected = "'error'" if "error" in conditions else any(conditions)
    assert run_ranks(run, len(conditions)) == len(conditions) * [expected]


def test_only_rank_0_works_and_every_rank_gets_its_result() -> None:
    def run(backend: Backend) -> str:
        agreement = Agreement(backend)
        with pytest.raises(RuntimeError, match="0 fails"):
            agreement.on_rank_0(lambda: result(f"{backend.world.rank} fails"))
        return agreement.on_rank_0(lambda: f"of rank {backend.world.rank}")

    assert run_ranks(run, 3) == 3 * ["of rank 0"]


def test_the_error_of_a_write_is_raised_once_on_every_rank() -> None:
    def run(backend: Backend) -> list[Any]:
        agreement, rank = Agreement(backend), backend.world.rank
        agreement.raise_write_error()
        for outcome in ("full", "", "full"):
            agreement.start_write(None if rank else partial(write, outcome))
            assert agreement.writing == (rank == 0)
            found = caught(lambda agreement: agreement.raise_write_error(), agreement)
            assert found == ("'full'" if outcome else None)
            agreement.raise_write_error()
        agreement.start_write(None if rank else partial(write, "full"))
        if rank == 0:  # without the other ranks
            with pytest.warns(RuntimeWarning, match="full"):
                agreement.warn_of_write_error()
        else:
            agreement.warn_of_write_error()
        return [agreement.writing]

    assert run_ranks(run, 2) == 2 * [[False]]


def write(outcome: str) -> None:
    if outcome:
        result(outcome)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_state_dict_that_fails_on_one_rank_prevents_the_save_on_all(failing: int, tmp_path: Path) -> None:
    """As the optimizer's does after an exception within its step."""

    def run(backend: Backend) -> list[str]:
        run, errors = training(backend=backend).run(1), []
        with checkpoint(tmp_path, run, every=1) as saves:
            run.run(1)
            state_dict = run.optimizer.state_dict
            if backend.world.rank == failing:
                run.optimizer.state_dict = partial(result, "load a state first")  # type: ignore[method-assign]
            for save in (saves.save, saves.step, partial(saves.save, wait=False)):
                errors.append(caught(lambda save: save(), save))
            run.optimizer.state_dict = state_dict  # type: ignore[method-assign]
            assert names(tmp_path) == []
            saves.save()
        return errors

    assert run_ranks(run, 2) == 2 * [3 * ["'load a state first'"]]
    assert names(tmp_path) == ["update-00000002"]
