"""Runs of steps with equal batch sizes, the form in which a trace is stored."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple, final

import numpy as np

from variable_batch_size._validation import IntArray, value_error


class TraceEndError(IndexError, ValueError):
    """Raised for a step or sample beyond the last one of a trace with `on_end="error"` or "stop"."""


@final
class Runs(NamedTuple):
    """Runs of steps with equal batch sizes; neighbors differ, so that equal traces have equal runs."""

    first_step: IntArray  # (runs,), as all below
    size: IntArray  # samples per step
    length: IntArray  # in steps; the last run of an infinite trace has 1
    offset: IntArray  # samples before the run


def merge_equal_runs(first_step: IntArray, size: IntArray, steps: int | None) -> Runs:
    """Return the runs after a merge of neighbors of equal batch size.

    Args:
        first_step: first step of each run, (runs,).
        size: batch sizes (samples), (runs,).
        steps: number of steps; None for an infinite trace.
    """
    differs = np.diff(size, prepend=0) != 0  # (runs before the merge,); the first is True, as sizes are > 0
    first_step, size = first_step[differs], size[differs]
    length = np.diff(first_step, append=steps or int(first_step[-1]) + 1)
    end = np.cumsum(size * length)  # (runs,), samples up to the end of the run
    return Runs(first_step, size, length, np.concatenate([[0], end[:-1]]))


def run_at(starts: IntArray, position: int) -> int:
    """Return the index of the last run that starts at or before a position.

    Args:
        starts: first step, or first sample, of each run of equal batch sizes, ascending, (runs,).
        position: a step or a sample, which may exceed int64.
    """
    return bisect_right(starts, position) - 1  # takes an eighth of the time of searchsorted if there are few runs


def end_of_run(starts: IntArray, length: IntArray, step: int) -> int:
    """Return the step after the last one of the run that has `step`; a run is a range of steps with equal batch sizes.

    Args:
        starts: first step of each run, (runs,).
        length: steps of each run, (runs,).
        step: the step.
    """
    run = run_at(starts, step)
    return int(starts[run]) + int(length[run])


def round_runs(
    first_step: IntArray, size: IntArray, length: IntArray, multiple: int, name: str
) -> tuple[IntArray, IntArray]:
    """Return the first step and the batch size of each run whose end is rounded to the nearest multiple of samples.

    A run of multiples stays one run; in any other run, every step becomes a run.

    Args:
        first_step: first step of each run, int64 of shape (runs,).
        size: batch size (samples) of each run, int64 of shape (runs,).
        length: steps of each run, int64 of shape (runs,).
        multiple: samples, >= 1.
        name: what the error message calls the trace.

    Raises:
        ValueError: if a batch size is less than `multiple`.
    """
    too_small = size < multiple  # (runs,)
    if too_small.any():
        run = too_small.argmax()
        requirement = f"{name} step {first_step[run]}: batch_size must be >= {multiple} to be rounded"
        raise value_error(requirement, size[run], "raise it, or round to a smaller multiple")
    is_multiple = size % multiple == 0  # (runs,)
    new_runs = np.where(is_multiple, 1, length)  # (runs,)
    new_length = np.repeat(np.where(is_multiple, length, 1), new_runs)  # (new runs,)
    run_ends = np.cumsum(np.repeat(size, new_runs) * new_length)  # (new runs,), samples
    rounded_ends = (run_ends // multiple + (run_ends % multiple * 2 >= multiple)) * multiple  # (new runs,)
    return np.cumsum(new_length) - new_length, np.diff(rounded_ends, prepend=0) // new_length
