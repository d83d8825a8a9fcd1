"""The plan: epochs along the trace, the cut of a step, and who computes what, against slow twins."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.reference import examples
from helpers.strategies import Case, cases, cut, rows_of, updates, worlds
from variable_batch_size.data import plan as plan_module
from variable_batch_size.data.plan import Deal, Epoch, Microbatch, Plan, counts, divisors, pieces
from variable_batch_size.trace.batch_trace import BatchTrace
from variable_batch_size.world import World


def ranks(size: int) -> list[World]:
    return [World(rank, size) for rank in range(size)]


def scalar(plan: Plan, epoch: Epoch, world: World, first_step: int | None = None) -> list[Microbatch]:
    """The rank's microbatches to the end of the epoch, one by one."""
    steps = (plan.step(epoch, s) for s in range(epoch.first_step if first_step is None else first_step, epoch.end_step))
    return [step.microbatch(turn, world) for step in steps for turn in range(step.rounds(world))]


# ------------------------------------------------------------------------------------------------------ the cut


@pytest.mark.parametrize("minibatch_size", range(1, 65))
def test_the_rest_of_a_step_is_cut_greedily_into_divisors(minibatch_size: int) -> None:
    for rest in range(minibatch_size):
        assert list(pieces(rest, minibatch_size)) == cut(rest, minibatch_size, True)
        assert sum(pieces(rest, minibatch_size)) == rest
        assert all(minibatch_size % piece == 0 for piece in pieces(rest, minibatch_size))
        assert list(pieces(rest, minibatch_size)) == sorted(pieces(rest, minibatch_size))
        assert pieces(rest, minibatch_size, False) == ((rest,) if rest else ())


def test_the_cut_of_the_design_and_its_longest_ones() -> None:
    assert pieces(17, 32) == (1, 16)
    assert max(len(pieces(rest, 64)) for rest in range(64)) == 6  # log2
    assert max(len(pieces(rest, 61)) for rest in range(61)) == 60  # a prime


@pytest.mark.parametrize("largest", [*range(1, 27), 61, 64])
def test_counts_are_those_of_the_cut(largest: int) -> None:
    for batch_size in (*range(1, 140), 4001):
        expected = [batch_size // m + len(pieces(batch_size % m, m)) for m in range(1, largest + 1)]
        assert counts(batch_size, largest).tolist() == expected


def test_counts_of_large_sizes_are_those_of_the_cut() -> None:
    found = counts(2**53 - 111, 4096)
    for m in (1, 2, 63, 64, 65, 3600, 4032, 4093, 4096):
        assert found[m - 1] == (2**53 - 111) // m + len(pieces((2**53 - 111) % m, m))


@given(st.integers(1, 10**6))
@examples(50)
def test_divisors_are_all_of_them_in_descending_order(number: int) -> None:
    found = divisors(number)
    assert list(found) == sorted(set(found), reverse=True)
    assert all(number % divisor == 0 for divisor in found)
    assert len(found) == sum(2 - (d * d == number) for d in range(1, int(number**0.5) + 1) if number % d == 0)


# --------------------------------------------------------------------------------------------------- the epochs


@given(cases(epochs=4), st.lists(st.integers(0, 3), max_size=6))
@examples(120)
def test_epochs_follow_one_another_along_the_trace(case: Case, visits: list[int]) -> None:
    plan, expected = case.plan(), updates(case.trace, case.dataset_size, case.drop_last, 4)
    for number in [*visits, 3, 0]:  # whatever was asked before
        epoch, steps = plan.epoch(number), expected[number]
        assert (epoch.number, epoch.first_step, epoch.end_step) == (number, steps[0].step, steps[-1].step + 1)
        assert epoch.trace_offset == case.trace.offset(epoch.first_step)
        assert epoch.samples == sum(step.batch_size for step in steps)
        assert epoch.samples_before == sum(step.batch_size for before in expected[:number] for step in before)
        for known in steps:
            step = plan.step(epoch, known.step)
            assert (step.number, step.start, step.batch_size) == (known.step, known.start, known.batch_size)
            assert plan.samples_before(epoch, known.step) == epoch.samples_before + known.start
        assert plan.samples_before(epoch, epoch.end_step) == epoch.samples_before + epoch.samples


@given(cases())
@examples(100)
def test_an_epoch_uses_every_position_once_and_leaves_out_only_a_tail(case: Case) -> None:
    plan = case.plan()
    for number in range(case.epochs):
        epoch = plan.epoch(number)
        used = [s.start + i for s in map_steps(plan, epoch) for i in range(s.batch_size)]
        assert used == list(range(epoch.samples))
        if not case.drop_last:
            assert epoch.samples == case.dataset_size
        elif epoch.samples < case.dataset_size:  # the step that does not fit opens the next epoch, whole
            assert epoch.samples + case.trace.batch_size(epoch.end_step) > case.dataset_size
            assert plan.step(plan.epoch(number), epoch.end_step - 1).batch_size == case.trace.batch_size(
                epoch.end_step - 1
            )


def map_steps(plan: Plan, epoch: Epoch) -> Iterator[plan_module.Step]:
    return (plan.step(epoch, number) for number in range(epoch.first_step, epoch.end_step))


# ------------------------------------------------------------------------------------------- law 1, its arithmetic


@given(cases(), worlds, st.integers(0, 2))
@examples(150)
def test_the_microbatches_of_a_step_are_its_batch_over_all_ranks(case: Case, size: int, number: int) -> None:
    plan, m = case.plan(), case.minibatch_size
    for step in map_steps(plan, plan.epoch(number)):
        expected = cut(step.batch_size, m, case.fixed_shape)
        assert step.num_microbatches == len(expected)
        weight = Fraction(0)
        for world in ranks(size):
            dealt = [step.microbatch(turn, world) for turn in range(step.rounds(world))]
            assert [b.ends_step for b in dealt] == [False] * (len(dealt) - 1) + [True]
            counted = [b.samples for b in dealt if b.samples]
            assert counted == expected[world.rank :: size]  # number i goes to rank i mod W
            assert len(dealt) == max(1, len(counted))  # only a rank without work replays, and once
            for turn, b in enumerate(dealt):
                assert (b.step, b.batch_size) == (step.number, step.batch_size)
                index = (world.rank + turn * size) % len(expected)
                assert b.start == step.start + sum(expected[:index])
                assert b.rows == (m if case.fixed_shape else expected[index])
            weight += sum(Fraction(b.samples, b.batch_size) for b in dealt)
        assert weight == 1


# -------------------------------------------------------------------- law 3: the plan knows no world, and both tell


def assert_deals_tell_what_steps_tell(plan: Plan, epoch: Epoch, world: World, first_step: int) -> None:
    expected = scalar(plan, epoch, world, first_step)
    done = 0
    step = first_step
    while step < epoch.end_step:
        deal = plan.deal(epoch, step, world)
        assert deal.first_step == step
        step += len(deal.ends)
        index, turn = deal.turns(0, len(deal))
        start, samples = deal.microbatches(index, turn)
        positions = deal.positions(start, samples).tolist()
        for k, b in enumerate(expected[done : done + len(deal)]):
            assert deal.first_step + index[k] == b.step
            assert (start[k], samples[k]) == (b.start, b.samples or samples[k])
            rows = rows_of(b.start, int(samples[k]), plan.minibatch_size, plan.fixed_shape)
            assert positions[k][: b.rows] == rows
        assert_parts_agree(deal, start, samples)
        done += len(deal)
    assert (step, done) == (epoch.end_step, len(expected))
    assert plan.count(epoch, first_step, world) == len(expected)


def assert_parts_agree(deal: Deal, start: plan_module.Ints, samples: plan_module.Ints) -> None:
    """Any part of a deal says the same as the whole."""
    middle = len(deal) // 2
    for begin, end in ((0, middle), (middle, len(deal)), (middle, middle)):
        one, other = deal.microbatches(*deal.turns(begin, end))
        np.testing.assert_array_equal(one, start[begin:end])
        np.testing.assert_array_equal(other, samples[begin:end])


@given(cases(), worlds, st.integers(0, 2), st.data(), st.integers(1, 9))
@examples(150)
def test_deals_of_many_steps_tell_what_single_steps_tell(
    case: Case, size: int, number: int, data: st.DataObject, steps_at_once: int
) -> None:
    plan = case.plan()
    epoch = plan.epoch(number)
    world = World(data.draw(st.integers(0, size - 1)), size)
    first_step = data.draw(st.integers(epoch.first_step, epoch.end_step))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "STEPS_AT_ONCE", steps_at_once)
        assert_deals_tell_what_steps_tell(plan, epoch, world, first_step)


def test_deals_go_on_beyond_the_steps_that_are_looked_up_together() -> None:
    plan = Plan(BatchTrace.from_sizes([3, 1, 2], on_end="cycle"), 20_000, 2)
    epoch = plan.epoch(1)
    assert epoch.end_step - epoch.first_step > 2 * plan_module.STEPS_AT_ONCE
    assert_deals_tell_what_steps_tell(plan, epoch, World(1, 2), epoch.first_step)


@given(cases(), worlds, st.integers(0, 2))
@examples(60)
def test_a_steps_samples_and_their_order_do_not_depend_on_the_world(case: Case, size: int, number: int) -> None:
    plan = case.plan()
    epoch = plan.epoch(number)
    numbered: dict[tuple[int, int], range] = {}
    for world in ranks(size):
        for step in map_steps(plan, epoch):
            for turn in range(step.rounds(world)):
                b = step.microbatch(turn, world)
                if b.samples:
                    numbered[b.step, world.rank + turn * size] = range(b.start, b.start + b.samples)
    positions = [position for key in sorted(numbered) for position in numbered[key]]
    assert positions == list(range(epoch.samples))


# ------------------------------------------------------------------------------------------------------ huge ones


@pytest.mark.parametrize(("batch_size", "minibatch_size"), [(10**8, 32), (10**8 - 1, 32), (10**8, 29), (7, 32)])
def test_a_billion_samples_take_no_memory(batch_size: int, minibatch_size: int) -> None:
    plan, world = Plan(BatchTrace.constant(batch_size), 10**9, minibatch_size), World(5, 8)
    tracemalloc.start()
    epoch = plan.epoch(2)
    deal = plan.deal(epoch, epoch.first_step, world)
    middle = len(deal) // 2
    index, turn = deal.turns(middle, middle + 256)
    start, samples = deal.microbatches(index, turn)
    positions = deal.positions(start, samples)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 2**20
    for k in range(0, 256, 51):
        b = plan.step(epoch, epoch.first_step + int(index[k])).microbatch(int(turn[k]), world)
        assert (start[k], samples[k]) == (b.start, b.samples or samples[k])
        assert positions[k].tolist() == rows_of(b.start, int(samples[k]), minibatch_size, True)


def test_the_last_microbatches_of_a_long_trace_are_found_without_the_earlier_ones() -> None:
    sizes = np.random.default_rng(0).integers(1, 200_000, 10**6)
    plan, world = Plan(BatchTrace.from_sizes(sizes), 10**9, 32), World(5, 8)
    before = np.concatenate([[0], np.cumsum(sizes)])
    tracemalloc.start()
    epoch = plan.epoch(90)
    deal = plan.deal(epoch, epoch.end_step - 3, world)
    index, turn = deal.turns(len(deal) - 40, len(deal))
    start, samples = deal.microbatches(index, turn)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 2**20
    assert epoch.trace_offset == before[epoch.first_step]
    assert before[epoch.end_step - 1] < epoch.trace_offset + 10**9 <= before[epoch.end_step]
    last = plan.step(epoch, epoch.end_step - 1)
    dealt = [last.microbatch(last.rounds(world) - 40 + k, world) for k in range(40)]
    assert start.tolist() == [b.start for b in dealt]
    assert samples.tolist() == [b.samples for b in dealt]


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["dataset_size", "minibatch_size"])
def test_sizes_below_one_are_refused(name: str) -> None:
    arguments = {"dataset_size": 10, "minibatch_size": 2} | {name: 0}
    with pytest.raises(ValueError, match=rf"^{name} must be an integer >= 1, got 0; pass a larger one$"):
        Plan(BatchTrace.constant(1), **arguments)


def test_a_batch_larger_than_the_dataset_is_refused_with_both_numbers() -> None:
    Plan(BatchTrace.from_sizes([3, 10], on_end="hold"), 10, 4)
    with pytest.raises(ValueError, match=r"has 10 samples, but the trace has one of 11; use a larger dataset or cut"):
        Plan(BatchTrace.from_sizes([3, 11], on_end="hold"), 10, 4)


def test_a_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^an epoch is a whole number >= 0, got -1; count epochs from 0$"):
        Plan(BatchTrace.constant(1), 10, 4).epoch(-1)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_trace_that_ends_inside_an_epoch_is_refused_with_what_is_missing(drop_last: bool) -> None:
    plan = Plan(BatchTrace.from_sizes([4, 4, 4, 4, 1]), 10, 4, drop_last)
    first = plan.epoch(0)
    missing = 10 - (17 - plan.trace.offset(first.end_step))
    message = (
        rf"epoch 1, which begins at step {first.end_step}, needs {missing} samples more than the trace's 5 steps give; "
        r'lengthen the trace, .* on_end="hold" or on_end="cycle"$'
    )
    with pytest.raises(ValueError, match=message):
        plan.epoch(1)
    assert plan.epoch(0) == first


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_trace_that_ends_with_the_epoch_is_long_enough(drop_last: bool) -> None:
    plan = Plan(BatchTrace.from_sizes([4, 6, 5, 5]), 10, 4, drop_last)
    assert [plan.epoch(number).end_step for number in (0, 1)] == [2, 4]
    with pytest.raises(ValueError, match="epoch 2, which begins at step 4, needs 10 samples more"):
        plan.epoch(2)
