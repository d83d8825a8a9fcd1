"""Who computes what: deals of many steps against single steps, in every world, also of huge datasets."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.properties import examples
from helpers.runs import samplings, speeds_of, worlds
from helpers.splitting import rows_of, split_sizes
from variable_batch_size.data.plan import plan as plan_module
from variable_batch_size.data.plan.deal import Dealing
from variable_batch_size.data.plan.plan import Plan
from variable_batch_size.data.plan.shares import by_speed
from variable_batch_size.trace.batch_trace import BatchTrace
from variable_batch_size.world import World


def ranks(size):
    return [World(rank, size) for rank in range(size)]


def scalar(plan, epoch, world, first_step, dealing):
    """The rank's microbatches to the end of the epoch, one by one."""
    steps = (plan.step(epoch, number, dealing) for number in range(first_step, epoch.end_step))
    return [step.microbatch(round_index, world) for step in steps for round_index in range(step.rounds(world))]


def map_steps(plan, epoch, dealing):
    return (plan.step(epoch, number, dealing) for number in range(epoch.first_step, epoch.end_step))


# ----------------------------------------------------------------------------------------------- law 1: the exact batch


@given(samplings(), worlds, st.integers(0, 2), st.booleans(), st.booleans())
@examples(150)
def test_the_microbatches_of_all_ranks_make_up_the_batch(case, size, number, spread, padded):
    plan, m, multiple_of = case.plan(), case.minibatch_size, size if spread else 1
    for step in map_steps(plan, plan.epoch(number), Dealing(multiple_of, padded)):
        expected = split_sizes(step.batch_size, m, case.fixed_shape, multiple_of)
        assert step.num_microbatches == len(expected)
        weight = Fraction(0)
        for world in ranks(size):
            dealt = [step.microbatch(round_index, world) for round_index in range(step.rounds(world))]
            assert [b.ends_step for b in dealt] == [False] * (len(dealt) - 1) + [True]
            counted = [b.samples for b in dealt if b.samples]
            assert counted == expected[world.rank :: size]  # number i goes to rank i mod W
            # Only a rank without work replays, and once; or one with less, before its own.
            replays = -(-len(expected) // size) - len(counted) if padded else not counted
            assert [b.samples == 0 for b in dealt] == [True] * replays + [False] * len(counted)
            for round_index, b in enumerate(dealt):
                assert (b.step, b.batch_size) == (step.number, step.batch_size)
                index = (world.rank + (round_index - padded * replays) * size) % len(expected)
                assert b.start == step.start + sum(expected[:index])
                assert b.rows == (m if case.fixed_shape else expected[index])
            weight += sum(Fraction(b.samples, b.batch_size) for b in dealt)
        assert weight == 1


# ------------------------------------------------------------------------------------- law 3: the world does not matter


def assert_deals_equal_steps(plan, epoch, world, first_step, dealing):
    expected = scalar(plan, epoch, world, first_step, dealing)
    done = 0
    step = first_step
    while step < epoch.end_step:
        deal = plan.deal(epoch, step, world, dealing)
        assert deal.first_step == step
        step += len(deal.ends)
        index, round_index = deal.locate(0, len(deal))
        start, samples = deal.microbatches(index, round_index)
        positions = deal.positions(start, samples).tolist()
        for k, b in enumerate(expected[done : done + len(deal)]):
            assert deal.first_step + index[k] == b.step
            assert (start[k], samples[k]) == (b.start, b.samples or samples[k])
            rows = rows_of(b.start, int(samples[k]), plan.minibatch_size, plan.fixed_shape)
            assert positions[k][: b.rows] == rows
        assert_parts_agree(deal, start, samples)
        done += len(deal)
    assert (step, done) == (epoch.end_step, len(expected))
    assert plan.count(epoch, first_step, world, dealing) == len(expected)


def assert_parts_agree(deal, start, samples):
    """Any part of a deal equals that part of the complete result."""
    middle = len(deal) // 2
    for begin, end in ((0, middle), (middle, len(deal)), (middle, middle)):
        one, other = deal.microbatches(*deal.locate(begin, end))
        np.testing.assert_array_equal(one, start[begin:end])
        np.testing.assert_array_equal(other, samples[begin:end])


@given(samplings(), worlds, st.integers(0, 2), st.data(), st.integers(1, 9), st.booleans(), st.booleans())
@examples(300)
def test_deals_of_many_steps_equal_single_steps(case, size, number, data, steps_per_deal, spread, padded):
    unequal = by_speed(data.draw(speeds_of(size)), size) if data.draw(st.booleans()) else None
    if unequal is not None:
        spread = spread and not case.fixed_shape
        padded = padded and spread
    plan = case.plan()
    epoch = plan.epoch(number)
    world = World(data.draw(st.integers(0, size - 1)), size)
    first_step = data.draw(st.integers(epoch.first_step, epoch.end_step))
    dealing = Dealing(size if spread else 1, padded, unequal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "STEPS_PER_DEAL", steps_per_deal)
        assert_deals_equal_steps(plan, epoch, world, first_step, dealing)


# -------------------------------------------------------------------------------------------------------- huge datasets


@pytest.mark.parametrize(("batch_size", "minibatch_size"), [(10**8, 32), (10**8 - 1, 32), (10**8, 29), (7, 32)])
def test_a_billion_samples_need_no_memory(batch_size, minibatch_size):
    plan, world = Plan(BatchTrace.constant(batch_size), 10**9, minibatch_size), World(5, 8)
    tracemalloc.start()
    epoch = plan.epoch(2)
    deal = plan.deal(epoch, epoch.first_step, world)
    middle = len(deal) // 2
    index, round_index = deal.locate(middle, middle + 256)
    start, samples = deal.microbatches(index, round_index)
    positions = deal.positions(start, samples)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 2**20
    for k in range(0, 256, 51):
        b = plan.step(epoch, epoch.first_step + int(index[k])).microbatch(int(round_index[k]), world)
        assert (start[k], samples[k]) == (b.start, b.samples or samples[k])
        assert positions[k].tolist() == rows_of(b.start, int(samples[k]), minibatch_size, True)


def test_the_last_microbatches_of_a_long_trace_need_no_earlier_ones():
    sizes = np.random.default_rng(0).integers(1, 200_000, 10**6)
    plan, world = Plan(BatchTrace.from_sizes(sizes), 10**9, 32), World(5, 8)
    before = np.concatenate([[0], np.cumsum(sizes)])
    tracemalloc.start()
    epoch = plan.epoch(90)
    deal = plan.deal(epoch, epoch.end_step - 3, world)
    index, round_index = deal.locate(len(deal) - 40, len(deal))
    start, samples = deal.microbatches(index, round_index)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 2**20
    assert epoch.trace_offset == before[epoch.first_step]
    assert before[epoch.end_step - 1] < epoch.trace_offset + 10**9 <= before[epoch.end_step]
    last = plan.step(epoch, epoch.end_step - 1)
    dealt = [last.microbatch(last.rounds(world) - 40 + k, world) for k in range(40)]
    assert start.tolist() == [b.start for b in dealt]
    assert samples.tolist() == [b.samples for b in dealt]
