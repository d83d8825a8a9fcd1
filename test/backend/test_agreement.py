"""The hosts of all ranks agree through a store: in calls that all of them make, and after updates, without a wait."""

from __future__ import annotations

import json
import re
import subprocess
import time
from typing import TypeVar

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from helpers.agreements import OfStore, agreements, in_threads, message_of
from helpers.properties import examples
from variable_batch_size.backend import departure
from variable_batch_size.backend.agreement import AbsentRankError, Agreement
from variable_batch_size.backend.departure import has_ended, identity
from variable_batch_size.testing import run_ranks
from variable_batch_size.world import World

Result = TypeVar("Result")
LONG = 3_000  # updates; no rank makes that many
texts = st.lists(st.text(st.characters(exclude_categories=()), max_size=30), min_size=1, max_size=4)


def result(outcome):
    if isinstance(outcome, str) and outcome.startswith("fails"):
        raise KeyError(outcome)
    return outcome


# ------------------------------------------------------------------------------------------- calls that all ranks make


@examples(60)
@given(st.lists(texts, min_size=1, max_size=4).filter(lambda rounds: len({len(row) for row in rounds}) == 1))
def test_every_rank_gets_the_messages_of_all_ranks(rounds):
    def run(backend):
        agreement = Agreement(backend)
        return [agreement.gather("test", messages[backend.world.rank]) for messages in rounds]

    size = len(rounds[0])
    assert run_ranks(run, size) == size * [rounds]


@examples(30)
@given(st.lists(st.sampled_from(["save()", "read()", "restore()"]), min_size=2, max_size=4))
def test_ranks_in_different_calls_get_the_same_error(calls):
    def run(backend):
        agreement = Agreement(backend)
        found = message_of(lambda: agreement.gather(calls[backend.world.rank], ""))
        assert agreement.gather("afterwards", "here") == len(calls) * ["here"]
        return found

    expected = len(calls) * [""]
    for rank, call in enumerate(calls):
        if call != calls[0]:
            expected = (
                f"all ranks must make the same calls in the same order, but rank 0 is in {calls[0]} and rank {rank} in "
                f"{call}; call both on every rank, after the same updates"
            )
            break
    assert run_ranks(run, len(calls)) == len(calls) * [expected]


@examples(60)
@given(st.lists(st.one_of(st.text(max_size=9), st.just("fails here"), st.just("fails")), min_size=1, max_size=4))
def test_every_rank_returns_the_results_of_all_or_raises_the_first_error(outcomes):
    def run(backend):
        agreement = Agreement(backend)
        return message_of(lambda: agreement.run_on_all("test", lambda: result(outcomes[backend.world.rank])))

    errors = [str(KeyError(outcome)) for outcome in outcomes if outcome.startswith("fails")]
    assert run_ranks(run, len(outcomes)) == len(outcomes) * [errors[0] if errors else outcomes]


@examples(30)
@given(st.lists(st.booleans(), min_size=1, max_size=4))
def test_a_condition_is_true_everywhere_if_it_is_on_one_rank(conditions):
    def run(backend):
        return Agreement(backend).any_rank("test", conditions[backend.world.rank])

    assert run_ranks(run, len(conditions)) == len(conditions) * [any(conditions)]


def test_only_rank_0_works_and_every_rank_gets_its_result():
    def run(backend):
        agreement, rank = Agreement(backend), backend.world.rank
        with pytest.raises(RuntimeError, match="fails 0"):
            agreement.run_on_rank_0("test", lambda: result(f"fails {rank}"))
        return agreement.run_on_rank_0("test", lambda: f"of rank {rank}")

    assert run_ranks(run, 3) == 3 * ["of rank 0"]


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named(absent, monkeypatch):
    monkeypatch.setattr("variable_batch_size.testing.ranks._TIMEOUT", 0.3)
    kept = []  # else a rank that has raised has ended

    def run(backend):
        kept.append(agreement := Agreement(backend))
        if backend.world.rank == absent:
            time.sleep(1)
            return None
        return message_of(lambda: agreement.gather("read()", ""))

    found = run_ranks(run, 3)
    assert found[absent] is None
    for message in found[:absent] + found[absent + 1 :]:
        assert f"every rank must come to read(), but rank {absent} has not, for 0.3 s; see the output" in message


def test_ranks_do_not_wait_for_one_that_has_failed(monkeypatch):
    monkeypatch.setattr("variable_batch_size.testing.ranks._TIMEOUT", 3600.0)  # this test would hang

    def run(backend):
        if backend.world.rank == 1:
            raise LookupError("rank 1")
        Agreement(backend).gather("read()", "")

    with pytest.raises(LookupError, match="rank 1"):
        run_ranks(run, 3)


def test_ranks_do_not_wait_for_one_that_has_left_but_read_what_it_has_said():
    ranks = agreements(3 * [dist.HashStore()])
    assert in_threads(lambda rank: ranks[rank].gather("first", str(rank)), 3) == 3 * [["0", "1", "2"]]
    ranks.pop()
    for agreement in ranks:
        with pytest.raises(AbsentRankError, match=r"come to second, but ranks? .* not, and a rank has ended; see"):
            agreement.gather("second", "")


@examples(30)
@given(size=st.integers(2, 4), former=st.lists(st.integers(2, 5), max_size=3))
def test_what_former_ranks_have_left_in_the_store_does_not_count(size, former):
    """A launcher may keep the store; a world ends anywhere."""
    store = dist.HashStore()
    for number in former:
        gone = agreements(number * [store])
        in_threads(lambda rank: gone[rank].gather("test", "of a former world"), number)  # noqa: B023
    ranks = agreements(size * [store])
    expected = [str(rank) for rank in range(size)]
    assert in_threads(lambda rank: ranks[rank].gather("test", str(rank)), size) == size * [expected]


def test_little_is_left_in_the_store():
    size, store = 3, dist.HashStore()
    ranks = agreements(size * [store])

    def run(rank):
        agreement = ranks[rank]
        for number in range(300):
            agreement.gather("test", "message")
            if rank == 0:
                agreement.publish("decision", number, "8")
            assert agreement.wait_for("decision", number) == "8"
            if number % 10 == rank:
                agreement.wish("stop")
            agreement.after_update()

    in_threads(run, size)
    assert store.num_keys() < 64 + 36


def test_a_world_of_one_needs_no_store():
    agreement = Agreement(OfStore(None, World()))
    assert agreement.gather("test", "alone") == ["alone"]
    assert agreement.run_on_all("test", lambda: "result") == ["result"]
    assert [agreement.any_rank("test", condition) for condition in (False, True)] == [False, True]
    agreement.publish("decision", 1, "8")
    for _ in range(2):
        agreement.after_update()
        assert not agreement.take_granted("stop")
        agreement.wish("stop")
        assert [agreement.take_granted("stop") for _ in range(2)] == [True, False]


@pytest.mark.parametrize("later", [0, 2])
def test_ranks_that_go_on_and_one_that_waits_for_them_get_one_error(later):
    """Ranks 0 and 2 wait in the sum of the next update; or, as with a device, are some updates ahead."""
    store = dist.HashStore()
    backends = [OfStore(store, World(rank, 3)) for rank in range(3)]
    ranks = in_threads(lambda rank: Agreement(backends[rank]), 3)

    def run(rank):
        ranks[rank].gather("save()", "before")
        for _ in range(1, 4 + (rank != 1) * later):
            ranks[rank].after_update()
        if rank == 1:
            return message_of(lambda: ranks[rank].gather("save()", ""))
        while (found := message_of(backends[rank].while_waiting)) is None:
            time.sleep(0.01)
        return found

    (message,) = set(in_threads(run, 3))
    assert re.match(
        r"every rank must come to save\(\), but rank 1 waits there and rank [02] makes the next up", message
    )


def test_ranks_that_come_late_to_a_call_pass_none_by():
    store = dist.HashStore()
    backends = [OfStore(store, World(rank, 2)) for rank in range(2)]
    ranks = in_threads(lambda rank: Agreement(backends[rank]), 2)

    def run(rank):
        for update in range(1, 5):
            if rank == 0 and update == 3:  # in the sum of the third update, for which rank 1 does not wait any more
                time.sleep(1.5)
                backends[0].while_waiting()
            ranks[rank].after_update()
            if update > 2:
                found = ranks[rank].gather("save()", str(update))
                backends[rank].while_waiting()
        return found

    assert in_threads(run, 2) == 2 * [["4", "4"]]


# --------------------------------------------------------------------------------------- what one rank tells the others


@examples(30)
@given(st.lists(st.text(max_size=5), min_size=1, max_size=70))
def test_ranks_learn_what_rank_0_tells_whenever_they_ask(told):
    teller, other = agreements(2 * [dist.HashStore()])
    for number, text in enumerate(told):
        teller.publish("decision", number, text)
    recent = range(max(0, len(told) - 64), len(told))
    assert [other.wait_for("decision", number) for number in recent] == [told[number] for number in recent]


# ------------------------------------------------------------------------------------------------------ other processes


def identity_of(process):
    return f"{departure._machine_identity()} {process.pid} {departure._state_and_start(process.pid)[1]}"


def killed():
    """Return the identity of a process that was killed."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        found = identity_of(process)
        process.kill()
    return found


def test_processes_that_were_killed_are_known():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        found = identity_of(process)
        assert not has_ended(found)
        assert not has_ended(identity())
        process.kill()
        while not has_ended(found):  # nobody has taken its exit code yet
            time.sleep(0.01)
    assert has_ended(found)
    assert not has_ended(f"another machine {found}")
    assert not has_ended("")
    assert has_ended(identity()[:-1])  # another one has its id now


@pytest.mark.parametrize("came", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_ranks_do_not_wait_for_a_process_that_was_killed(victim, came):
    """Also if it had come to the call: rank 0 tells the others of all messages, and was killed before it did."""
    ranks = agreements(3 * [dist.HashStore()])

    def run(rank):
        agreement = ranks[rank]
        agreement._processes[victim] = killed()
        if rank == victim:
            return came and agreement._store.set(f"1/{rank}", json.dumps(["read()", ""]))
        return message_of(lambda: agreement.gather("read()", f"of {rank}"))

    found = in_threads(run, 3)
    for rank in {0, 1, 2} - {victim}:
        if victim == 2 and came:
            assert found[rank] == ["of 0", "of 1", ""]
        else:
            assert re.search(rf"rank {victim} has not, and a rank has ended", found[rank])
