"""Simulations whose result is known: closed forms, inequalities, and Young's interval between saves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size.adaptive import ConstantBatch, PerDevice, Throughput
from variable_batch_size.cli.dry_run import dry_run
from variable_batch_size.data.plan.plan import Plan
from variable_batch_size.lab.cluster import CapacityTrace, synthetic
from variable_batch_size.lab.simulation import NoiseCurve, Overheads, simulate
from variable_batch_size.trace import BatchTrace

SECOND = Throughput.simple(samples_per_second=64)  # a device computes 64 samples in a second


def nodes(*rows, end):
    return CapacityTrace([time for time, _ in rows], [number for _, number in rows], end)


QUARTERS = st.integers(240, 4 * 10**6).map(lambda quarters: quarters / 4)  # seconds whose sums are exact


@given(st.integers(1, 16), QUARTERS, QUARTERS, st.integers(1, 512))
def test_constant_capacity(devices, start, end, ref):
    run = simulate(
        nodes((0, devices), end=start + end),
        PerDevice(64),
        throughput=SECOND,
        ref_batchsize=ref,
        overheads=Overheads(restart=start),
        prices=2.5,
        on_demand=10,
    )
    elapsed = start + end
    assert run.summary["updates"] == math.floor(end)
    progress = run.summary["updates"] * 64 * devices / ref
    assert run.summary["progress"] == pytest.approx(progress)
    assert run.summary["goodput"] == pytest.approx(progress / elapsed)
    assert run.summary["efficiency"] == pytest.approx(1)
    assert run.summary["cost"] == pytest.approx(devices * elapsed * 2.5 / 3600)
    assert run.summary["on_demand_cost"] == pytest.approx(devices * run.summary["updates"] * 10 / 3600)
    assert run.summary["idle"] == end - math.floor(end)


@pytest.mark.parametrize(("rule", "updates"), [("root", 200), ("invariant-adam", 100), ("adamscale", 100)])
def test_a_rule_that_reads_microbatches_does_not_spread_them(rule, updates):
    """As `CustomSampler` splits: 64 samples on 8 devices are four microbatches of 16, or eight of 8."""
    curve = NoiseCurve([0], [2000.0], [1.0]) if rule == "adamscale" else None
    options = {"throughput": Throughput.simple(16), "ref_batchsize": 64, "minibatch_size": 16, "noise": curve}
    run = simulate(nodes((0, 8), end=100), ConstantBatch(64), rule=rule, **options)
    assert run.summary["updates"] == updates


@pytest.mark.parametrize("dataset_size", [None, 2**20 + 1])
@pytest.mark.parametrize("overheads", [None, Overheads(grow_every=1e7, save_every=1e6)])
def test_no_update_is_made_in_a_loop(dataset_size, overheads):
    update = 2.0**-20
    within_one = (10 + 0.2 * update, 2), (10 + 0.4 * update, 3)
    run = simulate(
        nodes((0, 3), *within_one, (1e6, 2), (1e6 + 1, 3), end=3e7),
        ConstantBatch(3),
        throughput=Throughput.simple(2**20),
        rule="adascale",
        ref_batchsize=1,
        noise=NoiseCurve([0, 1e9, 1e12], [1.0, 2, 3], [1.0, 1, 1]),
        dataset_size=dataset_size,
        overheads=overheads,
    )
    assert run.summary["updates"] > 1e13


def test_a_notice_as_long_as_an_update_and_a_save_loses_nothing():
    capacity = nodes((0, 4), (100, 2), end=200)
    lost, kept, late = (
        simulate(
            capacity,
            PerDevice(64),
            throughput=SECOND,
            ref_batchsize=256,
            overheads=Overheads(restart=10.5, save=5, notice=notice),
        ).summary
        for notice in (0, 6, 5)
    )
    assert (lost["redone"], lost["preemptions"], lost["restarts"], lost["updates"]) == (89.5, 1, 1, 89)
    # Told at 94, it ends the update at 94.5 and has saved at 99.5.
    assert (kept["redone"], kept["saving"], kept["restarting"], kept["updates"]) == (0, 5, 21, 84 + 90)
    assert (late["redone"], late["saving"]) == (85, 4.5)  # 0.5 s too late


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=6),
    st.integers(40, 200),
    st.integers(1, 300),
)
def test_epochs_are_those_of_the_sampler(runs, dataset_size, updates):
    trace = BatchTrace.from_runs(*zip(*runs, strict=True), on_end="hold")
    planned = dry_run(Plan(trace, dataset_size, 8, max_updates=updates))
    run = simulate(
        nodes((0, 2), end=1e6),
        trace,
        throughput=SECOND,
        ref_batchsize=64,
        dataset_size=dataset_size,
        until=updates,
        by="updates",
    )
    assert run.summary["samples"] == planned.samples
    seconds = sum(n * SECOND.seconds(size, 2) for size, n in zip(planned.sizes.tolist(), planned.updates, strict=True))
    assert run.summary["elapsed"] == pytest.approx(seconds, rel=1e-9)
    replayed = dry_run(Plan(run.trace, dataset_size, 8, max_updates=updates))
    assert (replayed.sizes.tolist(), replayed.updates.tolist()) == (planned.sizes.tolist(), planned.updates.tolist())


@pytest.mark.slow("simulates many trainings")
def test_youngs_interval_is_nearly_the_best():
    """Young 1974: sqrt(2 * seconds of a save * mean time between kills)."""
    save, between = 60.0, 3600.0
    young = math.sqrt(2 * save * between)
    kills = [synthetic(1, between, 1e-3, 200 * between, seed) for seed in range(3)]

    def seconds_a_productive_one(interval):
        overheads = Overheads(save_every=interval, save=save, restart=30)
        runs = [
            simulate(trace, PerDevice(64), throughput=SECOND, ref_batchsize=64, overheads=overheads) for trace in kills
        ]
        return sum(run.summary["elapsed"] for run in runs) / sum(run.summary["productive"] for run in runs)

    costs = {factor: seconds_a_productive_one(factor * young) for factor in (0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.4, 2, 4)}
    assert costs[1] <= 1.02 * min(costs.values())
    assert min(costs[0.25], costs[4]) > 1.1 * costs[1]
