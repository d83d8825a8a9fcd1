"""Hypothesis strategies for the batch sizes of a trace, and the slow twin of its queries."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from hypothesis import strategies as st

MAX_BATCH_SIZE = 2**53

any_size = st.one_of(st.integers(1, 6), st.integers(1, 2000), st.integers(1, MAX_BATCH_SIZE))
any_sizes = st.lists(any_size, min_size=1, max_size=40)
runs = st.lists(st.tuples(any_size, st.integers(1, 9)), min_size=1, max_size=8)  # (batch size, number of steps)
any_sizes_or_runs = st.one_of(any_sizes, runs.map(lambda pairs: [size for size, count in pairs for _ in range(count)]))
any_on_end = st.sampled_from(["error", "stop", "hold", "cycle"])
hold_or_cycle = st.sampled_from(["hold", "cycle"])


def schedule_of(sizes: list[int], separator: str = " ") -> str:
    """Return the schedule with one entry for each step."""
    return separator.join(f"{step}:{size}" for step, size in enumerate(sizes))


class TraceTwin:
    """The slow twin of `BatchTrace`: the batch sizes of steps 0 to `horizon - 1` as a list."""

    def __init__(self, sizes: list[int], on_end: str, horizon: int) -> None:
        more = [sizes[-1]] * horizon if on_end == "hold" else sizes * horizon
        self.sizes = (sizes + more)[:horizon]
        self.offsets = [0, *accumulate(self.sizes)]

    def step_at(self, sample: int) -> int:
        return bisect_right(self.offsets, sample) - 1
