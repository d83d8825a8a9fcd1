"""Sweeps over capacity traces: they are simulations, and their statistics are those of textbooks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from helpers.properties import examples
from variable_batch_size.adaptive import ConstantBatch, PerDevice, Throughput
from variable_batch_size.lab.cluster import CapacityTrace, synthetic
from variable_batch_size.lab.simulation import Overheads, compare, means, simulate, sweep
from variable_batch_size.lab.simulation.sweep import RATES, SHARES

POLICIES = {"z": PerDevice(64), "a": ConstantBatch(200)}
ARGUMENTS = {
    "throughput": Throughput.simple(samples_per_second=64, communication_seconds=0.25),
    "ref_batchsize": 256,
    "overheads": Overheads(restart=20, save_every=300, save=5, notice=2),
    "prices": 2.0,
}
NO_UPDATE, NO_NODES = CapacityTrace([0], [1], 10), CapacityTrace([0], [0], 60)

capacities = st.builds(
    synthetic,
    nodes=st.integers(1, 6),
    mean_up=st.integers(100, 3000),
    mean_down=st.integers(100, 3000),
    duration=st.integers(1, 7200),
    seed=st.integers(0, 2**32),
)


def several(*found):
    return {f"trace {number}": capacity for number, capacity in enumerate(found)}


@given(capacities)
def test_a_sweep_of_one_is_a_simulation(capacity):
    row = sweep({"t": capacity}, {"p": PerDevice(64)}, **ARGUMENTS).loc[("t", "p")]
    summary = simulate(capacity, PerDevice(64), **ARGUMENTS).summary
    assert {name: row[name] for name in summary} == dict(summary)
    assert sum(row[f"{name}_share"] for name in SHARES) == pytest.approx(1)
    hours = capacity.end / 3600
    assert row["progress_per_hour"] * hours == pytest.approx(summary["progress"])
    assert row["progress_per_node_hour"] * hours * capacity.mean == pytest.approx(summary["progress"])
    assert row["restarts_per_day"] * hours == pytest.approx(summary["restarts"] * 24)
    assert row["cost_per_hour"] * hours == pytest.approx(summary["cost"])
    if summary["progress"]:
        assert row["cost_per_progress"] * summary["progress"] == pytest.approx(summary["cost"])
    else:
        assert row["cost_per_progress"] == math.inf


@examples(30)
@given(st.lists(capacities, min_size=2, max_size=5))
def test_intervals_are_those_of_the_t_tests_and_contain_the_mean(found):
    table = sweep(several(*found), POLICIES, **ARGUMENTS)
    for statistic, test in ((means, stats.ttest_1samp), (compare, stats.ttest_rel)):
        shown = statistic(table)
        assert shown.index.tolist() == [(policy, fact) for policy in POLICIES for fact in RATES if fact in table]
        for (policy, fact), (mean, low, high) in shown.iterrows():
            assert not low > mean
            assert not high < mean
            own, first = (table.xs(name, level="policy")[fact] for name in (policy, "z"))
            values = own - (first if test is stats.ttest_rel else 0)
            if not np.isfinite(values).all():
                assert math.isnan(low)
                assert math.isnan(high)
            elif values.std() > 1e-9 * abs(values).max():
                interval = test(own, first if test is stats.ttest_rel else 0.0).confidence_interval(0.95)
                assert (low, high) == pytest.approx(tuple(interval))
                assert mean == pytest.approx(values.mean(), abs=1e-12)


@given(st.lists(capacities, min_size=1, max_size=5))
def test_a_policy_differs_from_itself_by_exactly_0(found):
    table = sweep(several(*found), {"z": PerDevice(64), "again": PerDevice(64)}, **ARGUMENTS)
    differences = compare(table)
    finite = np.isfinite(means(table)["mean"])
    columns = ["mean", "low", "high"] if len(found) > 1 else ["mean"]
    assert (differences.loc[finite, columns] == 0).all(axis=None)


def test_one_trace_has_no_interval():
    shown = means(sweep({"t": synthetic(4, 600, 60, 7200, 1)}, POLICIES, **ARGUMENTS))
    assert shown["mean"].notna().all()
    assert shown[["low", "high"]].isna().all(axis=None)


def test_traces_in_which_nothing_runs_leave_the_other_facts():
    table = sweep(several(synthetic(4, 600, 60, 7200, 1), NO_UPDATE, NO_NODES), POLICIES, **ARGUMENTS)
    assert table["updates"].tolist()[2:] == [0] * 4
    assert table["cost_per_progress"].tolist()[2:] == [math.inf] * 4
    shown, differences = means(table), compare(table)
    assert shown.loc[("z", "cost_per_progress"), "mean"] == math.inf
    assert math.isnan(differences.loc[("a", "cost_per_progress"), "mean"])
    assert math.isnan(shown.loc[("z", "efficiency"), "mean"])
    for fact in ("progress_per_hour", "progress_per_node_hour", "idle_share", "cost_per_hour"):
        assert np.isfinite(shown.loc[("z", fact)]).all()
        assert np.isfinite(differences.loc[("a", fact)]).all()


def test_prices_of_some_traces_only():
    priced = CapacityTrace([0], [2], 600, prices=[1.0])
    table = sweep(several(priced, CapacityTrace([0], [2], 600)), POLICIES, **(ARGUMENTS | {"prices": None}))
    assert means(table).loc[("z", "cost_per_hour")].isna().all()
    table = sweep({"t": CapacityTrace([0], [2], 600)}, POLICIES, **(ARGUMENTS | {"prices": None}))
    assert not {"cost", "cost_per_hour", "cost_per_progress"} & set(means(table).index.unique("fact"))
