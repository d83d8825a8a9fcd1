"""The value `BatchTrace`: queries, equality, construction and rounding."""

from __future__ import annotations

import pickle
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.traces import TraceTwin, any_on_end, any_sizes, any_sizes_or_runs, hold_or_cycle, schedule_of
from variable_batch_size.trace import BatchTrace, TraceEndError

# Queries


@given(any_sizes_or_runs, st.data())
def test_queries_within_the_trace_equal_those_of_a_list(sizes, data):
    trace, offsets = BatchTrace.from_sizes(sizes), [0, *accumulate(sizes)]
    assert len(trace) == trace.steps == len(sizes)
    assert trace.total_samples == offsets[-1]
    assert trace.max_batch_size == max(sizes)
    assert [trace.batch_size(step) for step in range(len(sizes))] == sizes
    assert [trace.offset(step) for step in range(len(sizes) + 1)] == offsets
    for step, size in enumerate(sizes):
        assert trace.step_at(offsets[step]) == trace.step_at(offsets[step] + size - 1) == step
    sample = data.draw(st.integers(0, offsets[-1] - 1))
    step = trace.step_at(sample)
    assert trace.offset(step) <= sample < trace.offset(step + 1)


@given(any_sizes_or_runs, hold_or_cycle)
def test_queries_beyond_the_last_step_equal_those_of_a_list(sizes, on_end):
    horizon = 3 * len(sizes) + 5
    trace, twin = BatchTrace.from_sizes(sizes, on_end=on_end), TraceTwin(sizes, on_end, horizon)
    assert [trace.batch_size(step) for step in range(horizon)] == twin.sizes
    assert [trace.offset(step) for step in range(horizon + 1)] == twin.offsets
    for before, after in zip(twin.offsets, twin.offsets[1:], strict=False):
        for sample in (before, (before + after) // 2, after - 1):
            assert trace.step_at(sample) == twin.step_at(sample)


@given(any_sizes_or_runs, any_on_end)
def test_the_batch_size_is_constant_until_a_later_step_where_it_changes_or_the_sizes_end(sizes, on_end):
    trace, count = BatchTrace.from_sizes(sizes, on_end=on_end), len(sizes)
    for step in range(count if on_end in ("error", "stop") else 3 * count):
        until = trace.constant_until(step)
        if until is None:
            assert on_end != "error"
            assert len({*sizes[step:], sizes[-1]} if on_end != "cycle" else {*sizes}) == 1
            continue
        assert len({trace.batch_size(each) for each in range(step, until)}) == 1
        assert until % count == 0 or sizes[until % count] != trace.batch_size(step)


@given(any_sizes_or_runs, hold_or_cycle, st.integers(0, 2**80))
def test_queries_beyond_int64_are_exact(sizes, on_end, step):
    trace, total, count = BatchTrace.from_sizes(sizes, on_end=on_end), sum(sizes), len(sizes)
    if on_end == "cycle":
        expected = step // count * total + sum(sizes[: step % count])
    else:
        expected = sum(sizes[:step]) + max(0, step - count) * sizes[-1]
    assert trace.offset(step) == expected
    assert trace.offset(step + 1) - expected == trace.batch_size(step)
    assert trace.step_at(expected) == trace.step_at(expected + trace.batch_size(step) - 1) == step


@given(any_sizes_or_runs, hold_or_cycle, st.lists(st.integers(0, 2**62), max_size=20))
def test_batch_sizes_equals_batch_size_of_each_step(sizes, on_end, far):
    trace = BatchTrace.from_sizes(sizes, on_end=on_end)
    steps = np.array([*far, *range(2 * len(sizes))], np.int64)  # (steps,)
    result = trace.batch_sizes(steps)  # (steps,)
    assert result.dtype == np.int64
    assert result.tolist() == [trace.batch_size(step) for step in steps]
    assert trace.batch_sizes(steps.reshape(1, -1, 1)).tolist() == result.reshape(1, -1, 1).tolist()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64, object])
def test_batch_sizes_accepts_every_dtype_of_integers(dtype):
    trace = BatchTrace.from_sizes(range(1, 1001), on_end="cycle")
    assert trace.batch_sizes(np.array([0, 99, 100], dtype)).tolist() == [1, 100, 101]
    assert trace.batch_sizes([]).tolist() == []
    assert trace.batch_sizes([2**70]).tolist() == [2**70 % 1000 + 1]


@given(any_sizes, any_on_end, st.integers(0, 2**70))
def test_an_infinite_trace_holds_its_last_size_for_every_on_end(sizes, on_end, step):
    infinite = BatchTrace.parse(schedule_of(sizes), on_end=on_end)
    held = BatchTrace.from_sizes(sizes, on_end="hold")
    assert infinite.batch_size(step) == held.batch_size(step)
    assert infinite.offset(step) == held.offset(step)
    assert infinite.step_at(step) == held.step_at(step)
    assert infinite
    assert infinite.steps is None
    assert infinite.on_end == on_end
    assert infinite.max_batch_size == max(sizes)


@given(any_sizes_or_runs, st.integers(0, 2**70))
def test_on_end_error_rejects_positions_beyond_the_last_step(sizes, beyond):
    trace = BatchTrace.from_sizes(sizes)
    end, total = len(sizes), sum(sizes)
    queries = [
        (trace.batch_size, end + beyond, end),
        (trace.batch_sizes, [0, end + beyond], end),
        (trace.offset, end + 1 + beyond, end),
        (trace.step_at, total + beyond, total),
    ]
    for query, position, limit in queries:
        with pytest.raises(TraceEndError) as caught:
            query(position)
        found = position[-1] if isinstance(position, list) else position
        for part in (f"< {limit}", f"got {found}", f"{end} steps", 'on_end="stop", "hold"', "longer trace"):
            assert part in str(caught.value)
        with pytest.raises(TraceEndError, match=r'or on_end="hold" or "cycle"$'):
            getattr(trace.with_on_end("stop"), query.__name__)(position)
        assert isinstance(caught.value, (IndexError, ValueError))


# Equality


@given(any_sizes_or_runs, any_on_end)
def test_equal_traces_have_equal_hashes_and_fingerprints_however_created(sizes, on_end):
    trace = BatchTrace.from_sizes(sizes, on_end=on_end)
    others = [
        BatchTrace.from_sizes(np.array(sizes, np.uint64), on_end=on_end),
        BatchTrace.from_sizes(iter(sizes), on_end="cycle").with_on_end(on_end),
        BatchTrace.parse(schedule_of(sizes, separator=", "), steps=len(sizes), on_end=on_end),
        BatchTrace.of(sizes, on_end=on_end),
        pickle.loads(pickle.dumps(trace)),
    ]
    for other in others:
        assert other == trace
        assert hash(other) == hash(trace)
        assert other.fingerprint == trace.fingerprint
        assert other.on_end == on_end
        assert other.batch_sizes(range(len(sizes))).tolist() == sizes


@given(any_sizes_or_runs, any_on_end)
def test_different_traces_have_different_fingerprints(sizes, on_end):
    trace = BatchTrace.from_sizes(sizes, on_end=on_end)
    others = [BatchTrace.from_sizes(sizes, on_end=end) for end in ("error", "hold", "cycle") if end != on_end]
    others += [
        BatchTrace.from_sizes(more, on_end=on_end) for more in ([*sizes, sizes[-1]], [*sizes[:-1], sizes[-1] % 7 + 1])
    ]
    others += [BatchTrace.parse(schedule_of(sizes), on_end=on_end)]
    same = sizes[-1] % 7 + 1 == sizes[-1]
    assert sum(other == trace for other in others) == same
    assert len({other.fingerprint for other in [trace, *others]}) == len(others) + 1 - same
    assert trace != sizes


def test_the_fingerprint_of_a_trace_is_the_same_in_every_version():
    assert BatchTrace.parse("0:128 2000:256", steps=3000).fingerprint == FINGERPRINT
    assert BatchTrace.constant(8) == BatchTrace.constant(8, on_end="cycle") != BatchTrace.constant(8, steps=10**9)


FINGERPRINT = "5c7e8a25961a4eca06f84e03a20f158f5f0fe60e9ad49524e4c1ab1678f3fadf"


def test_a_trace_is_frozen_and_its_repr_is_short():
    trace = BatchTrace.from_sizes(range(1, 10**4))
    with pytest.raises(AttributeError):
        trace.steps = 3
    assert repr(trace) == 'BatchTrace("0:1 1:2 2:3 3:4 4:5 5:6 ...", 9999 steps, on_end="error")'


# Construction


def test_of_accepts_every_form_of_a_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = BatchTrace.from_sizes([3, 1, 2])
    trace.to_csv("a.csv")
    trace.to_csv(tmp_path / "0.csv")
    assert BatchTrace.of(trace) is trace
    assert BatchTrace.of(trace.with_on_end("hold")).on_end == "hold"
    assert BatchTrace.of(trace, on_end="cycle").batch_size(4) == 1
    for source in ("a.csv", "0.csv", tmp_path / "a.csv", [3, 1, 2], (3, 1, 2), np.array([3, 1, 2], np.int16)):
        assert BatchTrace.of(source) == trace
        assert BatchTrace.of(source, on_end="hold") == trace.with_on_end("hold")
    assert BatchTrace.of(range(1, 4)) == BatchTrace.from_sizes([1, 2, 3])
    assert BatchTrace.of(5) == BatchTrace.of(np.int64(5)) == BatchTrace.of("0:5") == BatchTrace.constant(5)


RUNS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=8)


@given(RUNS, st.sampled_from(["error", "stop", "hold", "cycle"]))
def test_runs_repeat_their_sizes(runs, on_end):
    sizes, lengths = zip(*runs, strict=True)
    expected = BatchTrace.from_sizes([size for size, length in runs for _ in range(length)], on_end=on_end)
    trace = BatchTrace.from_runs(sizes, lengths, on_end=on_end)
    assert trace == expected
    assert (trace.fingerprint, trace.steps, trace.total_samples) == (
        expected.fingerprint,
        expected.steps,
        expected.total_samples,
    )


def test_long_runs_take_no_memory():
    trace = BatchTrace.from_runs([3, 5], [2**40, 2**40])
    assert trace.steps == 2**41
    assert trace.total_samples == 8 * 2**40


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 400))
def test_rounded_sizes_are_multiples_that_keep_the_cumulative_samples(pairs, multiple):
    sizes = [multiple + more for more, count in pairs for _ in range(count)]
    trace = BatchTrace.from_sizes(sizes, on_end="cycle")
    rounded = trace.round_to(multiple)
    assert (rounded.steps, rounded.on_end) == (trace.steps, trace.on_end)
    for step in range(len(sizes)):
        assert rounded.batch_size(step) % multiple == 0
        assert rounded.batch_size(step) >= multiple
    for step in range(len(sizes) + 1):
        nearest = (2 * trace.offset(step) + multiple) // (2 * multiple) * multiple
        assert rounded.offset(step) == nearest
        assert 2 * abs(rounded.offset(step) - trace.offset(step)) <= multiple
    assert rounded.round_to(multiple) == rounded
    assert trace.round_to(1) == trace


@given(sizes=st.lists(st.integers(8, 99), max_size=9), last=st.integers(1, 20), step=st.integers(0, 2**70))
def test_an_infinite_trace_is_rounded_if_its_last_size_is_a_multiple(sizes, last, step):
    trace = BatchTrace.parse(schedule_of([*sizes, 8 * last]))
    rounded = trace.round_to(8)
    assert rounded.steps is None
    assert rounded.batch_size(step) % 8 == 0
    assert abs(rounded.offset(step) - trace.offset(step)) <= 4


def test_rounding_keeps_runs_of_multiples_as_runs():
    assert BatchTrace.constant(64, steps=10**15).round_to(32) == BatchTrace.constant(64, steps=10**15)
