"""Batch sizes that begin after so many samples: the first step of each, and those of a linear ramp."""

from __future__ import annotations

from variable_batch_size._validation import MAX_INT, check_int, value_error

_MAX_INCREMENTS = 10**6  # computed one after the other, because where one begins depends on the one before


def first_steps(thresholds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first step of each batch size, given after how many samples it begins.

    A step has the batch size of the last threshold that the samples of all steps before it have reached. A batch size
    is left out if no step has it.

    >>> first_steps([(0, 128), (1000, 256)])  # 7 steps have 896 samples, and 8 steps 1024
    [(0, 128), (8, 256)]

    Args:
        thresholds: samples and batch size (samples), by increasing samples from 0.
    """
    runs: list[tuple[int, int]] = []
    step = samples = 0  # where the last run ends, as far as it is known
    for threshold, size in thresholds:
        if threshold > samples:
            _, previous = runs[-1]
            steps = -(-(threshold - samples) // previous)
            step, samples = step + steps, samples + steps * previous
        if runs and runs[-1][0] == step:
            runs.pop()
        runs.append((step, size))
    return runs


def ramp_steps(start: int, end: int, increment: int, samples: int) -> list[tuple[int, int]]:
    """Return the first step of each batch size `start`, `start + increment`, ..., `end` of a ramp over `samples`.

    >>> ramp_steps(16, 32, 8, samples=101)  # 24 begins after 101 / 2 samples or more
    [(0, 16), (4, 24), (6, 32)]

    Raises:
        TypeError: if an argument is not an integer.
        ValueError: if an argument is not in [1, 2**53], or if `end` is not `start` plus 1 to 10^6 increments.
    """
    arguments = {"start": start, "end": end, "increment": increment, "samples": samples}
    start, end, increment, samples = (check_int(value, name, 1, MAX_INT) for name, value in arguments.items())
    increments, rest = divmod(end - start, increment)
    if rest or increments < 1:
        requirement = f"end must be start + n * increment with n >= 1, here {start} + n * {increment}"
        raise value_error(requirement, end, "change one of the three")
    if increments > _MAX_INCREMENTS:
        raise value_error("a ramp must have at most 10^6 increments", increments, "pass a larger increment")
    return first_steps([(-(-i * samples // increments), start + i * increment) for i in range(increments + 1)])
