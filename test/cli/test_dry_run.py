"""A dry run counts what the plan does, on any world."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size.cli.dry_run import dry_run
from variable_batch_size.data.plan.deal import Dealing
from variable_batch_size.data.plan.plan import Plan
from variable_batch_size.trace import BatchTrace
from variable_batch_size.world import World

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(
    SIZES, st.integers(30, 60), st.integers(1, 12), st.booleans(), st.booleans(), st.integers(1, 9), st.integers(1, 4)
)
def test_every_number_is_that_of_the_plan(sizes, dataset, minibatch, drop_last, fixed, world, epochs):
    trace = BatchTrace.from_sizes(sizes, on_end=("stop", "hold", "cycle")[epochs % 3])
    plan = Plan(trace, dataset, minibatch, drop_last=drop_last, fixed_shape=fixed)
    run = dry_run(plan, epochs)
    counted = sum(alike for _, alike in run.epochs)
    walked = [plan.epoch(number) for number in range(counted)]
    assert [epoch.end_step - epoch.first_step for epoch in walked] == [
        epoch.end_step - epoch.first_step for epoch, alike in run.epochs for _ in range(alike)
    ]
    steps = [plan.step(epoch, number) for epoch in walked for number in range(epoch.first_step, epoch.end_step)]
    assert dict(zip(run.sizes.tolist(), run.updates.tolist(), strict=True)) == Counter(s.batch_size for s in steps)
    assert run.samples == run.sizes @ run.updates == sum(step.batch_size for step in steps)
    assert run.last == walked[-1]
    assert counted == epochs or plan.ends_with(run.last)
    assert run.ends_early == (not run.last.complete)

    for spread in (False, True):
        load = run.load(world, spread=spread)
        for index, size in enumerate(run.sizes.tolist()):
            epoch, number = next(
                (epoch, number)
                for epoch in walked
                for number in range(epoch.first_step, epoch.end_step)
                if plan.step(epoch, number).batch_size == size
            )
            step = plan.step(epoch, number, Dealing(world if spread else 1))
            ranks = [
                [step.microbatch(turn, World(rank, world)) for turn in range(step.rounds(World(rank, world)))]
                for rank in range(world)
            ]
            dealt = [microbatch for rank in ranks for microbatch in rank]
            rows = [microbatch.rows for microbatch in dealt]
            assert load.microbatches[index] == step.num_microbatches == sum(m.samples > 0 for m in dealt)
            assert load.rounds[index] == max(map(len, ranks))
            assert load.busiest[index] == max(sum(m.rows for m in rank) for rank in ranks)
            assert (load.smallest[index], load.rows[index]) == (min(rows), max(rows))
            assert load.idle[index] == sum(m.samples == 0 for m in dealt)
            assert load.repeated[index] == sum(rows) - size
            assert set(rows) <= set(load.shapes)


def test_the_default_is_the_end_of_the_training():
    plan = Plan(BatchTrace.from_sizes([4, 4, 4], on_end="stop"), 8, 2)
    run = dry_run(plan)
    assert [(epoch.samples, alike) for epoch, alike in run.epochs] == [(8, 1), (4, 1)]
    assert run.ends_early
    assert [(epoch.samples, alike) for epoch, alike in dry_run(plan, 1).epochs] == [(8, 1)]
    infinite = Plan(BatchTrace.constant(4), 8, 2)
    with pytest.raises(ValueError, match=r"^epochs must be an integer >= 1, because the trace does not end .*; pass"):
        dry_run(infinite)
    assert [(epoch.number, alike) for epoch, alike in dry_run(infinite, 3).epochs] == [(0, 3)]
    with pytest.raises(ValueError, match="epochs must be an integer >= 1, got 0"):
        dry_run(infinite, 0)


@pytest.mark.parametrize("end", [{"max_updates": 10**12}, {"max_samples": 10**14}])
@pytest.mark.parametrize("trace", [BatchTrace.constant(64), BatchTrace.from_runs([32, 64], [9, 5], on_end="hold")])
def test_long_trainings_are_counted_at_once(trace, end):
    run = dry_run(Plan(trace, 50_000, 32, fixed_shape=False, **end))
    assert run.updates.sum() == end.get("max_updates", run.updates.sum())
    assert run.samples == run.sizes @ run.updates == end.get("max_samples", run.samples)
    assert len(run.epochs) < 9


def test_a_cycle_is_counted_at_once():
    trace = BatchTrace.from_sizes([10, 20, 30] * 2, on_end="cycle")
    run = dry_run(Plan(trace, 10**9, 32, max_updates=10**7))
    assert dict(zip(run.sizes.tolist(), run.updates.tolist(), strict=True)) == {10: 3333334, 20: 3333333, 30: 3333333}
