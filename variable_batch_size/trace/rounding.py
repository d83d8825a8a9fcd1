"""Runs of equal batch sizes, rounded to multiples such that the cumulative samples stay closest."""

from __future__ import annotations

import numpy as np

from variable_batch_size._validation import IntArray, value_error


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
    exact = size % multiple == 0  # (runs,)
    new_runs = np.where(exact, 1, length)  # (runs,)
    new_length = np.repeat(np.where(exact, length, 1), new_runs)  # (new runs,)
    end = np.cumsum(np.repeat(size, new_runs) * new_length)  # (new runs,), samples
    rounded = (end // multiple + (end % multiple * 2 >= multiple)) * multiple  # (new runs,)
    return np.cumsum(new_length) - new_length, np.diff(rounded, prepend=0) // new_length
