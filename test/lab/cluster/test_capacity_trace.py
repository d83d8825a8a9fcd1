"""`CapacityTrace` is the step function of its rows, and each transformation is one of that function."""

from __future__ import annotations

import copy
import math
import pickle
from bisect import bisect_right
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size.lab.cluster import CapacityTrace

TIMES = st.integers(0, 400).map(lambda quarter: quarter / 4)  # exact in binary, and often equal
ROWS = st.lists(st.tuples(TIMES, st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12).map(sorted)
EXTRA = st.integers(0, 100).map(lambda quarter: quarter / 4)


@st.composite
def traces(draw):
    rows = draw(ROWS)
    seconds, nodes, prices = zip(*rows, strict=True)
    priced = draw(st.booleans())
    end = seconds[-1] + draw(EXTRA) or 0.25
    return CapacityTrace(seconds, nodes, end, prices if priced else None), rows


def nodes_at(rows, second):
    row = bisect_right([time for time, _, _ in rows], second) - 1
    return rows[row][1] if row >= 0 else 0


def grid(trace, every=0.125):
    return np.arange(math.floor(trace.end / every) + 1) * every


@given(traces())
def test_at_is_the_last_row_up_to_a_time(case):
    trace, rows = case
    expected = [nodes_at(rows, second) for second in grid(trace)]
    assert trace.at(grid(trace)).tolist() == expected
    assert [trace.at(float(second)) for second in grid(trace)] == expected
    assert trace.at(grid(trace).reshape(-1, 1)).shape == (len(expected), 1)
    assert trace.changes == np.count_nonzero(np.diff(expected))
    exact = sum(Fraction(count) for count in expected[:-1]) / (len(expected) - 1)  # all times are on the grid
    assert trace.mean == pytest.approx(float(exact), rel=1e-14)
    assert trace.seconds[0] == 0
    assert (np.diff(trace.seconds) > 0).all()
    assert trace.lengths.sum() == trace.duration == trace.end


@given(traces(), st.integers(10**9, 4 * 10**9))
def test_unix_times_begin_at_the_first_row(case, shift):
    trace, rows = case
    seconds, nodes, _ = (np.array(column, float) for column in zip(*rows, strict=True))
    if (end := trace.end - seconds[0]) > 0:
        expected = CapacityTrace(seconds - seconds[0], nodes.astype(int), end)
        assert CapacityTrace(seconds + shift, nodes.astype(int), trace.end + shift) == expected
    else:
        with pytest.raises(ValueError, match=r"^end must be > \d+.* the time of the last row, got \d+.*; pass a later"):
            CapacityTrace(seconds + shift, nodes.astype(int))
    with pytest.raises(
        ValueError, match=r"^times must be seconds, got \d+, which looks like Unix milliseconds; divide"
    ):
        CapacityTrace((seconds + shift).round() * 1000, nodes.astype(int))


@given(traces(), st.integers(0, 99), st.integers(1, 100))
def test_a_slice_begins_at_0(case, low, high):
    trace, _ = case
    start, stop = sorted([trace.end * low / 100 // 0.25 * 0.25, trace.end * high / 100 // 0.25 * 0.25])
    if start == stop:
        return
    part = trace.slice(start, stop)
    assert part.end == stop - start
    times = grid(part) if stop == trace.end else grid(part)[:-1]  # the change at another end is left out
    assert part.at(times).tolist() == trace.at(times + start).tolist()
    assert trace.slice() == trace.slice(0, trace.end + 5) == trace
    if start > 0:
        both = part.mean * part.duration + trace.slice(0, start).mean * start
        assert both == pytest.approx(trace.slice(0, stop).mean * stop, rel=1e-12)


@given(traces(), st.floats(0.1, 30))
def test_resampling_reads_the_trace_at_equal_intervals(case, every):
    trace, _ = case
    resampled = trace.resampled(every)
    readings = np.arange(math.floor(trace.end / every) + 1) * every
    readings = readings[readings <= trace.end]
    assert resampled.at(readings).tolist() == trace.at(readings).tolist()
    assert set(resampled.seconds) <= set(readings)
    assert resampled.end == trace.end


@given(traces(), st.integers(0, 9), st.integers(0, 9), st.integers(1, 8))
def test_clip_devices_and_scaled_change_the_values(case, one, other, per_node):
    trace, _ = case
    times, (low, high) = grid(trace), sorted([one, other])
    assert trace.clip(low, high).at(times).tolist() == trace.at(times).clip(low, high).tolist()
    assert trace.clip(max=high) == trace.clip(0, high)
    devices = trace.devices(per_node)
    machines = devices.machines(per_node)
    assert (machines.seconds.tolist(), machines.nodes.tolist()) == (trace.seconds.tolist(), trace.nodes.tolist())
    assert devices.at(times).tolist() == (trace.at(times) * per_node).tolist()
    assert trace.scaled(0.5).at(times / 2).tolist() == trace.at(times).tolist()
    assert trace.scaled(4).scaled(0.25) == trace
    if trace.prices is not None and devices.prices is not None:
        cost = trace.nodes * trace.prices @ trace.lengths
        assert devices.nodes * devices.prices @ devices.lengths == pytest.approx(cost, rel=1e-14)


@given(traces())
def test_a_csv_file_holds_the_trace(tmp_path_factory, case):
    path = tmp_path_factory.mktemp("csv") / "capacity.csv"
    trace = case[0].scaled(1 / 3)
    trace.to_csv(path)
    again = CapacityTrace.from_csv(path)
    assert again == trace
    assert hash(again) == hash(trace)
    assert [item.name for item in path.parent.iterdir()] == [path.name]


@given(traces())
def test_a_copy_is_as_immutable(case):
    for again in (pickle.loads(pickle.dumps(case[0])), copy.deepcopy(case[0])):
        assert again == case[0]
        assert not again.nodes.flags.writeable


def test_a_reading_is_not_missed_by_rounding():
    resampled = CapacityTrace([0, 18.3], [1, 2], 30).resampled(0.3)  # 61 * 0.3 == 18.3, and 18.3 / 0.3 > 61
    assert resampled.at(61 * 0.3) == 2


def test_equal_functions_are_equal():
    trace = CapacityTrace([0, 5, 10], [0, 3, 3], end=20)
    assert trace == CapacityTrace([5, 5], [7, 3], end=20.0)
    assert trace != CapacityTrace([5], [3], end=21)
    assert trace != CapacityTrace([5], [3], end=20, prices=[1])
    assert trace != "trace"
    assert repr(trace) == "CapacityTrace(0 to 3 nodes, mean 2.25, 1 changes, 20 s)"
    for array in (trace.seconds, trace.nodes):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        trace.end = 3.0


def test_it_draws_itself():
    import matplotlib

    matplotlib.use("Agg")
    axes = CapacityTrace([0, 3600], [4, 2], end=7200).plot()
    assert CapacityTrace([0, 3600], [4, 0], end=7200).plot(axes) is axes
    assert [axes.get_xlabel(), axes.get_ylabel()] == ["time (hours)", "nodes"]
    assert axes.get_xlim() == (0, 2)
    values = [patch.get_data().values.tolist() for patch in axes.patches]
    assert values == [[4, 2], [4, 2], [4, 0], [4, 0]]


def test_a_missing_library_names_its_extra(tmp_path, monkeypatch):
    from variable_batch_size._extras import import_extra

    with pytest.raises(ModuleNotFoundError, match=r"^this needs nothing_here, .*'variable_batch_size\[plot\]'$"):
        import_extra("nothing_here.pyplot", "plot")
    (tmp_path / "broken_here.py").write_text("import another_missing_one")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'another_missing_one'$"):
        import_extra("broken_here", "plot")
