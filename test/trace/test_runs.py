"""A trace of runs is that of its sizes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size.trace import BatchTrace

RUNS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=8)


@given(RUNS, st.sampled_from(["error", "stop", "hold", "cycle"]))
def test_runs_repeat_their_sizes(runs: list[tuple[int, int]], on_end: Any) -> None:
    sizes, lengths = zip(*runs, strict=True)
    expected = BatchTrace.from_sizes([size for size, length in runs for _ in range(length)], on_end=on_end)
    trace = BatchTrace.from_runs(sizes, lengths, on_end=on_end)
    assert trace == expected
    assert (trace.fingerprint, trace.steps, trace.total_samples) == (
        expected.fingerprint,
        expected.steps,
        expected.total_samples,
    )


def test_long_runs_take_no_memory() -> None:
    trace = BatchTrace.from_runs([3, 5], [2**40, 2**40])
    assert trace.steps == 2**41
    assert trace.total_samples == 8 * 2**40
