"""The batch trace of a training that nothing interrupts, against one that is made update by update."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from variable_batch_size.adaptive import ConstantBatch, PerDevice, Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation import to_batch_trace

ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), min_size=1, max_size=8).map(sorted)
POLICY = st.one_of(st.integers(1, 40).map(PerDevice), st.integers(1, 40).map(ConstantBatch))


def update_by_update(rows, end, policy, rate, network):
    sizes = []
    now = Fraction(0)
    while now < end:
        devices = ([0] + [nodes for time, nodes in rows if time <= now])[-1]
        if devices == 0:
            now = min((Fraction(time) for time, _ in rows if time > now), default=Fraction(end))
            continue
        batch_size = policy.samples * devices if isinstance(policy, PerDevice) else policy.batch_size
        now += Fraction(-(-batch_size // devices), rate) + (network if devices > 1 else 0)
        if now <= end:
            sizes.append(batch_size)
    return sizes


@example([(0, 1), (10, 4)], 20, ConstantBatch(40), 1, 0)  # an update that does not end hides the devices to come
@given(ROWS, st.integers(1, 60), POLICY, st.sampled_from([1, 2, 4, 8]), st.integers(0, 3))
def test_updates_follow_one_another(rows, extra, policy, rate, network):
    end = rows[-1][0] + extra
    expected = update_by_update(rows, end, policy, rate, network)
    capacity = CapacityTrace([time for time, _ in rows], [nodes for _, nodes in rows], end)
    throughput = Throughput.simple(rate, network)
    if not expected:
        with pytest.raises(ValueError, match=r"^an update must end within the capacity trace, got none in Capacity"):
            to_batch_trace(capacity, policy, throughput)
        return
    trace = to_batch_trace(capacity, policy, throughput, on_end="hold")
    assert trace.on_end == "hold"
    assert trace.batch_sizes(range(len(trace))).tolist() == expected
    limit = max(1, len(expected) // 2)
    limited = to_batch_trace(capacity, policy, throughput, max_updates=limit)
    assert limited.batch_sizes(range(len(limited))).tolist() == expected[:limit]


def test_ten_million_updates_take_no_loop():
    capacity = CapacityTrace(range(0, 1000, 2), [4, 8] * 250, end=1000)
    assert len(to_batch_trace(capacity, PerDevice(1), Throughput.simple(2**14))) == 1000 * 2**14


@pytest.mark.parametrize("seconds", [100_001, 1e10])
def test_a_batch_trace_may_have_a_hundred_million_steps(seconds):
    capacity = CapacityTrace([0], [1], end=seconds)
    limited = to_batch_trace(capacity, PerDevice(1), Throughput.simple(1000), max_updates=10**8)
    assert len(limited) == len(to_batch_trace(capacity.slice(0, 1e5), PerDevice(1), Throughput.simple(1000))) == 10**8


@pytest.mark.parametrize(("end", "rate", "updates"), [(0.3, 10, 3), (0.7, 10, 7), (7.6, 80, 608), (2.3, 1000, 2300)])
def test_an_update_that_ends_with_the_trace_up_to_rounding_counts(end, rate, updates):
    assert len(to_batch_trace(CapacityTrace([0], [1], end), PerDevice(1), Throughput.simple(rate))) == updates
