"""Traces of multiples that stay closest to another trace."""

from hypothesis import given
from hypothesis import strategies as st

from helpers.traces import schedule_of
from variable_batch_size.trace import BatchTrace


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
