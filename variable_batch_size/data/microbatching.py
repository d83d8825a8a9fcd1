"""How a batch is split into microbatches: full ones, and a remainder in partial ones. Pure functions of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np

from variable_batch_size._validation import IntArray


@final
@dataclass(frozen=True, slots=True)
class Microbatch:
    """The rows that one rank puts through forward and backward at once.

    Attributes:
        step: number of the update that it belongs to.
        batch_size: samples of that update, over all ranks.
        samples: distinct samples that count: the weight of this microbatch in a mean; 0 for a replay.
        rows: rows of the tensor that the loader yields.
        start: position of its first sample in the order of the epoch.
        ends_step: whether it is the last one of this rank before the update.
    """

    step: int
    batch_size: int
    samples: int
    rows: int
    start: int
    ends_step: bool


@lru_cache(maxsize=1024)
def partial_sizes(remainder: int, minibatch_size: int, fixed_shape: bool = True) -> tuple[int, ...]:
    """Return the sizes of the partial microbatches of a remainder, in samples, in ascending order.

    With `fixed_shape` every size divides `minibatch_size`, so that repeated samples fill the rows evenly; divisors are
    taken greedily, the largest first. Otherwise there is one partial microbatch.

    Args:
        remainder: samples of a step that do not fill a microbatch, 0 <= remainder < minibatch_size.
        minibatch_size: rows of a microbatch.
        fixed_shape: whether every microbatch has `minibatch_size` rows.

    >>> partial_sizes(27, 32)
    (1, 2, 8, 16)
    >>> partial_sizes(27, 32, fixed_shape=False)
    (27,)
    """
    if not fixed_shape:
        return (remainder,) if remainder else ()
    sizes: list[int] = []
    for divisor in divisors(minibatch_size):
        times, remainder = divmod(remainder, divisor)
        sizes += [divisor] * times
    return tuple(reversed(sizes))


@lru_cache(maxsize=4)  # `fit` may try several world sizes for one batch size
def microbatch_counts(batch_size: int, max_minibatch_size: int) -> IntArray:
    """Return the number of microbatches of a step for minibatch_size = 1, 2, ..., `max_minibatch_size`, fixed shape.

    The same as `batch_size // m + len(partial_sizes(batch_size % m, m))` for every m, a full microbatch being the
    largest divisor, but for all m together. The divisors of each m come in descending order: m / 1, m / 2, ... in one
    pass a quotient, and the remaining ones in one pass a divisor.

    Returns:
        (max_minibatch_size,), read-only.
    """
    left = np.full(max_minibatch_size + 1, batch_size)  # (sizes,): samples not yet in a microbatch, by minibatch_size
    found = np.zeros(max_minibatch_size + 1, dtype=np.int64)  # (sizes,): microbatches

    def take(sizes: slice, divisor: IntArray | int) -> None:
        times, left[sizes] = np.divmod(left[sizes], divisor)
        found[sizes] += times

    last = math.isqrt(max_minibatch_size)
    for quotient in range(1, last + 1):
        take(slice(quotient, None, quotient), np.arange(1, max_minibatch_size // quotient + 1))
    for divisor in range(max_minibatch_size // (last + 1), 0, -1):
        take(slice(divisor * (last + 1), None, divisor), divisor)
    found.flags.writeable = False
    return found[1:]


@lru_cache(maxsize=64)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of `number`, in descending order.

    >>> divisors(12)
    (12, 6, 4, 3, 2, 1)
    """
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}, reverse=True))
