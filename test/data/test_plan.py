"""The plan: epochs along the trace, and what it rejects."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.properties import examples
from helpers.runs import samplings
from variable_batch_size.data.batches import Batches, Position
from variable_batch_size.data.plan.plan import Plan
from variable_batch_size.trace.batch_trace import BatchTrace
from variable_batch_size.world import World

# --------------------------------------------------------------------------------------------------------------- epochs


@given(samplings(epochs=4), st.lists(st.integers(0, 3), max_size=6))
@examples(120)
def test_epochs_follow_one_another_along_the_trace(case, visits):
    plan, expected = case.plan(), case.updates
    for number in [*visits, 3, 0]:  # whatever was asked before
        epoch, steps = plan.epoch(number), expected[number]
        first_step = sum(map(len, expected[:number]))
        assert (epoch.number, epoch.first_step, epoch.end_step) == (number, first_step, first_step + len(steps))
        assert epoch.complete == case.is_complete(number)
        assert plan.ends_with(epoch) == (not epoch.complete or case.ended_after(number))
        assert epoch.trace_offset == case.trace.offset(epoch.first_step)
        assert epoch.samples == sum(step.batch_size for step in steps)
        assert epoch.samples_before == sum(step.batch_size for before in expected[:number] for step in before)
        for known in steps:
            step = plan.step(epoch, known.step)
            assert (step.number, step.start, step.batch_size) == (known.step, known.start, known.batch_size)
            assert plan.samples_before(epoch, known.step) == epoch.samples_before + known.start
        assert plan.samples_before(epoch, epoch.end_step) == epoch.samples_before + epoch.samples


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(9, 12), st.integers(1, 40), st.booleans())
@examples(200)
def test_a_run_that_another_end_has_cut_uses_the_rest_of_its_epoch(sizes, dataset_size, samples, drop_last):
    trace = BatchTrace.of(sizes, on_end="cycle")
    options = {"dataset_size": dataset_size, "minibatch_size": 4, "drop_last": drop_last}
    batches = Batches(Plan(trace, **options, max_samples=samples), World())
    number = 0
    while not batches.plan.ends_with(epoch := batches.plan.epoch(number)):
        number += 1
    state = {**batches.position_state(Position(number, epoch.end_step)), "fixed_shape": False}
    plan = Plan(trace, **options).resume(state)
    rest = plan.epoch(number)
    steps = [plan.step(rest, step) for step in range(state["step"], rest.end_step)]
    used = [step.start + i for step in steps for i in range(step.batch_size)]
    assert used == list(range(epoch.samples, rest.samples))
    following = plan.epoch(number + 1)
    dropped = dataset_size - rest.samples
    assert dropped == 0 or (drop_last and trace.batch_size(following.first_step) > dropped)


@given(samplings(epochs=4))
@examples(60)
def test_the_fraction_of_a_training_that_lies_before_a_step(case):
    plan, epochs = case.plan(), len(case.updates)
    for number, steps in enumerate(case.updates):
        epoch = plan.epoch(number)
        for known in steps:
            of_epochs = (number + known.start / (epoch.samples if epoch.complete else case.dataset_size)) / epochs
            fraction = plan.fraction(epoch, known.step, epochs)
            assert of_epochs - 1e-12 <= fraction <= 1
            assert plan.ends or fraction == pytest.approx(of_epochs)


# --------------------------------------------------------------------------------------------------------------- errors


def test_the_updates_of_a_number_of_epochs():
    plan = Plan(BatchTrace.parse("0:24 3:10 9:37 12:9 18:50"), 203, 8)
    assert [plan.updates_in(epochs) for epochs in (0.5, 1, 1.5, 3)] == [6, 11, 19, 26]
    assert [plan.epochs_before(plan.epoch(1), step) for step in (11, 12, 21)] == [1, 1 + 37 / 203, 2]
    ended = Plan(BatchTrace.constant(50), 203, 8, max_updates=7)
    assert (ended.updates_in(3), ended.epochs_before(ended.epoch(1), 7)) == (7, 1 + 100 / 203)


def test_sizes_of_numpy_become_numbers_of_python():
    """A state holds them, and JSON writes it."""
    sizes = {"dataset_size": 10, "minibatch_size": 4, "max_updates": 3, "max_samples": 9}
    plan = Plan(BatchTrace.constant(1), **{name: np.int64(size) for name, size in sizes.items()})
    found = {name: getattr(plan, name) for name in sizes}
    assert found == sizes
    assert {*map(type, found.values())} == {int}


@pytest.mark.parametrize("drop_last", [False, True])
def test_rejects_a_trace_that_ends_inside_an_epoch(drop_last):
    plan = Plan(BatchTrace.from_sizes([4, 4, 4, 4, 1]), 10, 4, drop_last)
    first = plan.epoch(0)
    missing = 10 - (17 - plan.trace.offset(first.end_step))
    message = (
        rf"its 5 steps end in epoch 1, which begins at step {first.end_step}, {missing} samples before the end of "
        r'epoch 1; add steps .* on_end="stop", "hold" or "cycle"$'
    )
    with pytest.raises(ValueError, match=message):
        plan.epoch(1)
    assert plan.epoch(0) == first


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 200), st.booleans(), st.sampled_from(["hold", "cycle"]))
@examples(100)
def test_a_far_epoch_is_the_one_that_is_reached_step_by_step(size, more, number, drop_last, on_end):
    """Epochs of a constant batch size are not counted one by one."""
    sizes = [7, 3, size] if more % 2 else [size]
    plans = [Plan(BatchTrace.from_sizes(sizes, on_end=on_end), size + more + 7, 4, drop_last) for _ in range(2)]
    for each in range(number):
        plans[0].epoch(each)
    assert plans[0].epoch(number) == plans[1].epoch(number)
    assert plans[0].epoch(0) == plans[1].epoch(0)
