"""Where does the time of `reproducible=True` go, and what would one float64 a number cost in the place of two integers?

With a power of two M, (x + M) - M is x rounded to a multiple of ulp(M), and float64 adds such multiples exactly (Demmel
and Nguyen 2013, doi 10.1109/ARITH.2013.9). M is fixed here. In a training it would have to follow the largest number of
each tensor, so that the figures are less than such a sum would cost. All are multiples of a copy of the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from timeit import timeit

import torch
from torch import Tensor

from records import spread
from results import record
from variable_batch_size.optim.reproducible import limbs

NUMBERS, REPEATS, WARM_UP = 10_000_000, 15, 2
M = 1.5 * 2.0**22  # ulp(M) is 2^-30


def add_float64(total: Tensor, numbers: Tensor, weight: Tensor, *, first: bool = False) -> Tensor:
    """Add `weight` times numbers to sums in float64, (n,), and return the largest absolute value, 0-D."""
    largest = []
    for part, new in zip(torch.split(total, limbs.CHUNK), torch.split(numbers, limbs.CHUNK), strict=True):
        largest.append(torch.linalg.vector_norm(new, float("inf")))
        rounded = new.to(torch.float64).mul_(weight).add_(M).sub_(M)
        if first:
            part.copy_(rounded)
        else:
            part.add_(rounded)
    return torch.stack(largest).max() * weight


def value_of_float64(total: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write `factor` times sums to `out`."""
    for part, result in zip(torch.split(total, limbs.CHUNK), torch.split(out, limbs.CHUNK), strict=True):
        result.copy_(part * factor)


def main() -> None:
    """Record each part of a sum."""
    torch.set_num_threads(1)
    numbers, out = torch.randn(NUMBERS), torch.empty(NUMBERS)
    integers, floats = torch.zeros(2, NUMBERS, dtype=torch.int64), torch.zeros(NUMBERS, dtype=torch.float64)
    weight = torch.tensor(0.25, dtype=torch.float64)
    parts: dict[tuple[str, str], Callable[[], object]] = {
        ("two integers", "add the first microbatch"): lambda: limbs.add(integers, numbers, weight, first=True),
        ("two integers", "add another microbatch"): lambda: limbs.add(integers, numbers, weight),
        ("two integers", "make the sum unique"): lambda: limbs.carry(integers),
        ("two integers", "write the gradient"): lambda: limbs.value(integers, weight, out),
        ("one float64", "add the first microbatch"): lambda: add_float64(floats, numbers, weight, first=True),
        ("one float64", "add another microbatch"): lambda: add_float64(floats, numbers, weight),
        ("one float64", "write the gradient"): lambda: value_of_float64(floats, weight, out),
    }
    times: dict[tuple[str, str], list[float]] = {part: [] for part in parts}
    for repeat in range(-WARM_UP, REPEATS):
        copy = min(timeit(lambda: out.copy_(numbers), number=1) for _ in range(3))
        for part, function in parts.items():
            taken = timeit(function, number=1)
            if repeat >= 0:
                times[part].append(taken / copy)
    for (what, case), ratios in times.items():
        record("time of a part of an exact sum", what, spread(ratios), on="10M numbers", case=case)


if __name__ == "__main__":
    main()
