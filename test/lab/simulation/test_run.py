"""What a simulation returns: timeline, trace, prices and picture."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from variable_batch_size.adaptive import ConstantBatch, PerDevice, Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation import NoiseCurve, Overheads, simulate
from variable_batch_size.lab.simulation.result import cost_until, with_prices
from variable_batch_size.trace import BatchTrace

SECOND = Throughput.simple(samples_per_second=64)
CAPACITY = CapacityTrace([0, 60, 90], [4, 2, 4], 180, prices=[1.0, 3.0, 1.0])


def run(**changes):
    arguments = {
        "capacity": CAPACITY,
        "controller": PerDevice(64),
        "throughput": SECOND,
        "ref_batchsize": 256,
        "devices_per_node": 2,
        "overheads": Overheads(restart=20),
    }
    return simulate(**(arguments | changes))


def test_the_timeline():
    table = run().timeline
    assert table.columns.tolist() == [
        *("begin", "end", "state", "nodes", "devices", "batch_size", "updates", "samples", "progress")
    ]
    assert table.iloc[1].tolist() == [20.0, 60.0, "redone", 4, 8, 512, 40, 20480, 80.0]
    assert table["state"].tolist() == ["restarting", "redone", "restarting", "productive", "restarting", "productive"]
    assert table["begin"].tolist() == [0, 20, 60, 80, 90, 110]


def test_a_run_can_be_sent_to_another_process():
    assert pickle.loads(pickle.dumps(run())) == run()


def test_neighbors_of_one_kind_are_one_row():
    overheads = Overheads(save_every=1, save=0.5, blocking=False)
    found = run(overheads=overheads, capacity=CapacityTrace([0], [4], 180))
    assert found.timeline["updates"].tolist() == [180]


def test_the_trace_is_that_of_the_kept_updates():
    assert run().trace == BatchTrace.from_runs([256, 512], [10, 70])
    empty = run(until=0.5, by="seconds")
    assert (empty.summary["updates"], empty.summary["elapsed"], empty.timeline["state"].tolist()) == (
        *(0, 0.5),
        ["restarting"],
    )
    assert "efficiency" not in empty.summary


def test_the_replay_of_the_trace_makes_the_same_updates():
    found = run(overheads=None)
    again = run(overheads=None, controller=found.trace.with_on_end("stop"))
    assert again.trace == found.trace
    assert again.summary["progress"] == found.summary["progress"]


def test_a_lost_decision_is_made_again():
    asked = []

    def controller(input):
        asked.append((input.updates, input.devices, input.batch_size))
        return 64 * input.devices

    overheads = Overheads(restart=20, save_every=25)
    found = run(controller=controller, every=30, start=128, delay=5, overheads=overheads)
    # Killed at 60, it goes back to the 29 updates of the save at 45.25, and asks question 30 again. At each restart in
    # another world it asks again the question whose answer counts: to see that it changes, and with the present size.
    assert asked == [
        *[(0, 8, 128), (30, 8, 512)],
        *[(0, 4, 128), (0, 4, 512), (30, 4, 256)],
        *[(30, 8, 256), (30, 8, 256), (60, 8, 512), (90, 8, 512)],
    ]
    # The answers of 4 devices count from the first update with them, as those of 8 do.
    assert found.trace == BatchTrace.from_runs([128, 512, 256, 512], [5, 24, 10, 70])


def test_the_answer_counts_after_the_delay():
    sizes = iter([100, 200, 300, 400])
    found = run(
        controller=lambda input: next(sizes),
        capacity=CapacityTrace([0], [4], 1e9),
        every=10,
        delay=4,
        start=50,
        bounds=(50, 250),
        until=35,
        by="updates",
    )
    assert found.trace == BatchTrace.from_runs([50, 100, 200, 250], [4, 10, 10, 11])


@example([(0, 1)], [(1, 0), (1, 1)], 1)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=6).map(sorted),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=6).map(sorted),
    st.integers(0, 60),
)
def test_the_cost_is_a_sum_over_seconds(nodes, prices, elapsed):
    capacity = CapacityTrace(*zip(*nodes, strict=True), end=60)
    rented = with_prices(capacity, tuple(zip(*prices, strict=True)))
    total = 0
    for second in range(elapsed):
        total += capacity.at(second) * [price for time, price in prices if time <= max(second, prices[0][0])][-1]
    assert cost_until(rented, elapsed) == pytest.approx(total / 3600)
    assert rented.at(np.arange(60)).tolist() == capacity.at(np.arange(60)).tolist()


def test_whose_prices_count():
    assert run().summary["cost"] == pytest.approx((60 * 4 + 30 * 2 * 3 + 90 * 4) / 3600)
    assert run(prices=3.6).summary["cost"] == pytest.approx((60 * 4 + 30 * 2 + 90 * 4) / 1000)
    assert run(until=60, by="seconds").summary["cost"] == pytest.approx(240 / 3600)
    assert "cost" not in run(capacity=CapacityTrace([0], [4], 180)).summary
    assert run(on_demand=36).summary["on_demand_cost"] == pytest.approx((10 * 2 + 70 * 4) / 100)


def test_a_batch_trace_that_stops_ends_the_run():
    assert run(controller=BatchTrace.of([64, 64, 64], on_end="stop")).summary["updates"] == 3


def test_the_constant_rule_needs_no_reference():
    found = run(rule="constant", ref_batchsize=None, noise=NoiseCurve.constant(1.0, 1.0), controller=ConstantBatch(64))
    assert found.summary["progress"] == found.summary["updates"]
    assert "efficiency" not in found.summary
