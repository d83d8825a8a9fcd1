"""Runs of steps with equal batch sizes, the form in which a trace is stored."""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np

from variable_batch_size._validation import IntArray, value_error


class TraceEndError(IndexError, ValueError):
    """Raised for a step or sample beyond the last one of a trace with `on_end="error"` or "stop"."""


@final
class Runs(NamedTuple):
    """Runs of which no two neighbors have the same batch size, so that equal traces have equal runs."""

    first_step: IntArray  # (runs,), as all below
    size: IntArray  # samples per step
    length: IntArray  # in steps; an infinite last run has 1
    offset: IntArray  # samples before the run


def merged(first_step: IntArray, size: IntArray, steps: int | None, name: str) -> Runs:
    """Return the runs after a merge of neighbors of equal batch size.

    Args:
        first_step: first step of each run, (runs,).
        size: batch sizes (samples), (runs,).
        steps: number of steps; None for an infinite trace.
        name: what the error message calls the trace.

    Raises:
        ValueError: if the batch sizes sum to 2**63 or more.
    """
    differs = np.diff(size, prepend=0) != 0  # (runs before the merge,)
    first_step, size = first_step[differs], size[differs]
    length = np.diff(first_step, append=steps or int(first_step[-1]) + 1)
    end = np.cumsum(size * length)  # (runs,), samples up to the end of the run
    # The first sum that overflows is below 2**64, and therefore negative as an int64.
    overflow = (length > (2**63 - 1) // size) | (end < 0)  # (runs,)
    if overflow.any():
        found = f"a larger sum in the run from step {first_step[overflow.argmax()]}"
        raise value_error(f"{name}: the batch sizes must sum to <= 2**63 - 1", found, "shorten the trace")
    return Runs(first_step, size, length, np.concatenate([[0], end[:-1]]))


def run_at(starts: IntArray, position: int) -> int:
    """Return the index of the last run that starts at or before `position`, which may exceed int64."""
    return int(starts.searchsorted(min(position, int(starts[-1])), side="right")) - 1


def end_of_run(starts: IntArray, length: IntArray, step: int) -> int:
    """Return the step after the last one of the run of `step`, whose length is known."""
    run = run_at(starts, step)
    return int(starts[run]) + int(length[run])
