"""Shares by speed: no others would end earlier, and every update has exactly its samples, in every world."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.runs import error_of, samplings, speeds_of, worlds
from helpers.splitting import split_sizes
from variable_batch_size.data.batches import Place, Position
from variable_batch_size.data.plan.deal import Dealing
from variable_batch_size.data.plan.shares import PERIOD, by_speed, share, turns
from variable_batch_size.world import World


def in_turns(units, speeds):
    """The slow twin: the rank of each unit, each next one to the rank that would finish it first."""
    taken, owners = [0] * len(speeds), []
    for _ in range(units):
        owner = min(range(len(speeds)), key=lambda rank: (Fraction(taken[rank] + 1, speeds[rank]), rank))
        taken[owner] += 1
        owners.append(owner)
    return owners


# ------------------------------------------------------------------------------------------------------- pure functions


def whole_speeds(speeds):
    """The smallest whole numbers in the same ratio; none if they are equal."""
    unequal = by_speed(speeds, len(speeds))
    return () if unequal is None else unequal.speeds


@given(st.integers(0, 14), st.integers(2, 4).flatmap(speeds_of))
@examples(100)
def test_no_other_shares_end_earlier(units, speeds):
    whole = whole_speeds(speeds) or (1,) * len(speeds)
    found = [int(turns(whole, rank).count(units)) for rank in range(len(speeds))]
    every = itertools.product(range(units + 1), repeat=len(speeds))
    best = min(max(map(Fraction, n, speeds)) for n in every if sum(n) == units)
    assert sum(found) == units
    assert max(map(Fraction, found, speeds)) == best


@given(st.integers(1, 6).flatmap(speeds_of), st.integers(0, 200))
@examples(100)
def test_turns_equal_the_slow_twin(speeds, units):
    whole = whole_speeds(speeds) or (1,) * len(speeds)
    owners = np.array(in_turns(units, whole), dtype=np.int64)
    for rank in range(len(speeds)):
        own, first = turns(whole, rank), np.arange(units + 1)
        assert own.count(first).tolist() == [int((owners[:n] == rank).sum()) for n in first]
        assert own.count_of_lower(first).tolist() == [int((owners[:n] < rank).sum()) for n in first]
        numbers = np.flatnonzero(owners == rank)
        assert own.number(np.arange(len(numbers))).tolist() == numbers.tolist()


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.integers(1, 10**15))
@examples(100)
def test_measured_speeds_are_nearly_kept(speeds, batch_size):
    whole = whole_speeds(speeds) or (1,) * len(speeds)
    assert math.gcd(*whole) == 1
    found = [int(turns(whole, rank).count(batch_size)) for rank in range(len(speeds))]
    assert sum(found) == batch_size
    ideal = batch_size / sum(speeds)
    rounded = 1 + sum(speeds) / min(speeds) / PERIOD  # a speed is rounded by at most half a part of PERIOD, or is one
    assert max(n / speed for n, speed in zip(found, speeds, strict=True)) <= ideal * rounded**2 + 1 / min(speeds)


def test_only_the_ratios_of_speeds_count():
    assert whole_speeds([0.1, 0.3]) == whole_speeds(np.array([2.0, 6.0])) == (1, 3)
    assert whole_speeds([5e-324, 1e308, 1]) == (1, PERIOD, 1)
    assert whole_speeds([1]) == whole_speeds([2.5] * 3) == ()


MISTAKES = [
    (3, TypeError, r"^speeds must be a sequence of numbers, got 3 \(int\); pass a number for each rank"),
    ("31", TypeError, r"^speeds must be a sequence of numbers, got '31' \(str\)"),
    ([3, "1"], TypeError, r"^speeds\[1\] must be a finite number >= 0, got '1' \(str\)"),
    ([3], ValueError, r"^speeds must have a number for each of 2 ranks, got 1 numbers; pass a number for each rank"),
    ([3, 0], ValueError, r"^speeds\[1\] must be > 0, got 0"),
    ([math.inf, 1], ValueError, r"^speeds\[0\] must be a finite number >= 0, got inf"),
]


@pytest.mark.parametrize(("speeds", "kind", "message"), MISTAKES)
def test_wrong_speeds_raise(speeds, kind, message):
    with pytest.raises(kind, match=message):
        vbs.CustomSampler(10, 4, 2, 0, speeds=speeds)


# ---------------------------------------------------------------------------------------------------- who computes what


@given(samplings(), worlds, st.integers(0, 2), st.booleans(), st.booleans(), st.data())
@examples(150)
def test_the_microbatches_of_all_ranks_make_up_the_batch(case, size, number, spread, padded, data):
    unequal = by_speed(data.draw(speeds_of(size)), size)
    spread = (spread and not case.fixed_shape) or padded
    if unequal is None or (case.fixed_shape and spread):
        return
    plan, m, dealing = case.plan(), case.minibatch_size, Dealing(size if spread else 1, padded, unequal)
    epoch = plan.epoch(number)
    for update in range(epoch.first_step, epoch.end_step):
        step = plan.step(epoch, update, dealing)
        ranks = [World(rank, size) for rank in range(size)]
        dealt = [[step.microbatch(turn, world) for turn in range(step.rounds(world))] for world in ranks]
        counted = [b for rank in dealt for b in rank if b.samples]
        covered = sorted(position for b in counted for position in range(b.start, b.start + b.samples))
        assert covered == list(range(step.start, step.start + step.batch_size))
        assert sum(Fraction(b.samples, b.batch_size) for b in counted) == 1
        assert len(counted) == step.num_microbatches
        for rank in dealt:
            assert [b.ends_step for b in rank] == [False] * (len(rank) - 1) + [True]
            assert [b.samples > 0 for b in rank] == sorted(b.samples > 0 for b in rank)  # replays come first
            assert all(step.start <= b.start <= step.start + step.batch_size - b.rows for b in rank if spread)
            assert all(b.rows == (m if case.fixed_shape else b.samples or b.rows) for b in rank)
        if not spread:
            expected = split_sizes(step.batch_size, m, case.fixed_shape)
            assert [b.samples for b in sorted(counted, key=lambda b: b.start)] == expected
            owners = in_turns(len(expected), unequal.speeds)
            assert [sum(b.samples > 0 for b in rank) for rank in dealt] == [owners.count(r) for r in range(size)]
            continue
        owners = in_turns(step.batch_size, unequal.speeds)
        for rank, own in enumerate(dealt):
            samples, sizes = owners.count(rank), [b.samples for b in own if b.samples]
            assert sum(sizes) == samples
            assert max(sizes, default=1) - min(sizes, default=1) <= 1
            if not padded:
                assert len(sizes) == -(-samples // m)
        if padded:
            most = max(owners.count(rank) for rank in range(size))
            assert {len(rank) for rank in dealt} == {-(-most // m)}


@given(samplings(), worlds, st.booleans(), st.booleans(), st.data())
@examples(100)
def test_an_epoch_has_each_sample_once_and_a_run_resumes_with_other_speeds(case, size, spread, padded, data):
    """A run reads some updates with one list of speeds in one world, and the rest of its epoch with another."""
    number, read = data.draw(st.integers(0, case.epochs - 1)), dict[int, set[int]]()
    state = None
    stop = data.draw(st.integers(0, len(case.updates[number])))
    for part, world_size in enumerate((size, data.draw(worlds))):
        speeds = data.draw(speeds_of(world_size))
        for rank in range(world_size):
            sampler = case.sampler(World(rank, world_size), speeds=speeds)
            if state is not None:
                sampler.load_state_dict(state)
            elif number:
                sampler.set_epoch(number)
            sampler.attach(spread=spread, padded=padded)
            length, rows = len(sampler), list(sampler)
            assert length == len(rows)
            plan, dealing, world = sampler.plan, sampler.dealing, sampler.world
            epoch, begin = sampler.batches.epoch(sampler.due), sampler.due.step
            steps = [plan.step(epoch, update, dealing) for update in range(begin, epoch.end_step)]
            due = [step.microbatch(turn, world) for step in steps for turn in range(step.rounds(world))]
            for row, b in zip(rows, due, strict=True):
                if b.samples and (part or b.step - epoch.first_step < stop):
                    read.setdefault(b.step, set()).update(row)
        if not part and stop < len(case.updates[number]):
            place = Place(sampler.due, sampler.place.samples)
            for update in case.updates[number][:stop]:
                here = Position(place.position.epoch, place.position.step + 1)
                place = Place(here, place.samples + update.batch_size)
            state = {**sampler.state_dict(), **sampler.batches.state_dict(place, end_pending=False)}
        elif not part:
            break
    expected = {step: set(samples) for epoch, step, samples in case.steps if epoch == number}
    assert read == expected


def test_a_billion_samples_need_no_work_per_sample():
    owned = [share((3, 2, 2), rank, np.array([10**15 + 3, 1]), 32, padded=False) for rank in range(3)]
    assert np.sum([own.samples for own in owned], axis=0).tolist() == [10**15 + 3, 1]
    sampler = vbs.CustomSampler(10**9, 10**9, 3, 2, 10**6, speeds=(3, 2, 2), fixed_shape=False)
    assert len(sampler) == 286  # 285,714,286 samples


# --------------------------------------------------------------------------------------------------------- equal rounds


@given(st.integers(1, 60), st.integers(1, 8), st.integers(2, 4), st.booleans(), st.data())
@examples(100)
def test_equal_rounds_hold_or_raise(batch, m, size, spread, data):
    """Every rank has as many rounds as the fastest one and no replay, or a step raises; whole ones go round robin."""
    speeds = whole_speeds(data.draw(speeds_of(size)))
    if not speeds:
        return

    def read(rank):
        sampler = vbs.CustomSampler(batch, batch, size, rank, m, speeds=speeds, equal_rounds=True, fixed_shape=False)
        sampler.attach(spread=spread)
        step = sampler.batches.step(sampler.position)
        assert all(step.microbatch(turn, sampler.world).samples for turn in range(step.rounds(sampler.world)))
        return len(list(sampler))

    owners = in_turns(batch, speeds)
    shares = [owners.count(rank) for rank in range(size)]
    rounds = -(-max(shares) // m)
    errors = [error_of(lambda rank=rank: read(rank)) for rank in range(size)]
    possible = min(shares) >= rounds  # also asked before an optimizer attaches
    assert {error is None for error in errors} == {possible and (spread or -(-batch // m) % size == 0)}
    if errors[0] is None and spread:
        assert {read(rank) for rank in range(size)} == {rounds}
    elif errors[0] is not None and not possible:
        assert errors[0].endswith("; choose a larger batch size or minibatch_size, or speeds that differ less")


def test_one_graph_for_all_ranks_leaves_no_room_for_speeds():
    sampler = vbs.CustomSampler(8, 8, 2, 0, 4, speeds=(3, 1))
    with pytest.raises(
        ValueError,
        match=r"^speeds= needs a fixed world whose ranks run on their own, got a device on which .* XLA; omit speeds=$",
    ):
        sampler.attach(compiles_shapes=True)
    with pytest.raises(ValueError, match=r"got a world that may change; omit speeds=$"):
        sampler.attach(elastic=True)


def test_microbatches_stay_the_same_where_the_result_depends_on_them():
    """Of five microbatches the fast rank computes four, also if the noise is measured."""
    sampler = vbs.CustomSampler(40, 40, 2, 0, 8, speeds=(3, 1), fixed_shape=False)
    assert [len(row) for row in sampler] == [7, 7, 8, 8]
    sampler.attach(spread=False)
    assert [len(row) for row in sampler] == [8] * 4
