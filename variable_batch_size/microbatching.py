"""How a batch is split into microbatches. Pure functions of numbers.

With a fixed shape, a batch is split into full microbatches and a remainder in partial ones, whose samples are repeated.
Otherwise the microbatches have sizes that differ by at most one, so that no normalization layer sees a single sample;
there may be more of them than necessary, so that every rank computes the same number.
"""

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
        number: its place in the update, over all ranks; a replay has the number of the one it repeats.
        ends_step: whether it is the last one of this rank before the update.
    """

    step: int
    batch_size: int
    samples: int
    rows: int
    start: int
    number: int
    ends_step: bool

    @property
    def distinct(self) -> float:
        """The part of its rows that count: samples / rows; 0 for a replay."""
        return self.samples / self.rows


@lru_cache(maxsize=1024)
def partial_sizes(remainder: int, minibatch_size: int) -> tuple[int, ...]:
    """Return the sizes of the partial microbatches of a remainder with a fixed shape, in samples, in ascending order.

    Every size divides `minibatch_size`, so that repeated samples fill the rows evenly; divisors are taken greedily, the
    largest first.

    Args:
        remainder: samples of a step that do not fill a microbatch, 0 <= remainder < minibatch_size.
        minibatch_size: rows of a microbatch.

    >>> partial_sizes(27, 32)
    (1, 2, 8, 16)
    """
    sizes: list[int] = []
    for divisor in divisors(minibatch_size):
        times, remainder = divmod(remainder, divisor)
        sizes += [divisor] * times
    return tuple(reversed(sizes))


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """The sizes of a step's microbatches, in samples and in their order: those in `small`, then `count` of `size`."""

    small: tuple[int, ...]
    size: int
    count: int

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return len(self.small) + self.count

    def locate(self, number: int) -> tuple[int, int]:
        """Return the position of the first sample of a microbatch in the step, and its size.

        >>> Cut(small=(1, 2), size=4, count=3).locate(3)
        (7, 4)
        """
        if number < len(self.small):
            return sum(self.small[:number]), self.small[number]
        return sum(self.small) + (number - len(self.small)) * self.size, self.size


def cut(batch_size: int, minibatch_size: int, *, fixed_shape: bool, multiple_of: int = 1) -> Cut:
    """Return how a step is split into microbatches.

    With a fixed shape: `partial_sizes` of the remainder, then full microbatches. Otherwise
    min(B, ceil(ceil(B / m) / c) * c) microbatches whose sizes differ by at most one, the smaller ones first; for c = 1
    and m >= 3 none has a single sample unless B = 1.

    Args:
        batch_size: B, samples of the step.
        minibatch_size: m, maximum number of rows of a microbatch.
        fixed_shape: whether every microbatch has `minibatch_size` rows.
        multiple_of: c; without a fixed shape the number of microbatches is a multiple of c, if there are as many
            samples.

    >>> cut(33, 32, fixed_shape=False)
    Cut(small=(16,), size=17, count=1)
    >>> cut(33, 32, fixed_shape=False, multiple_of=4)
    Cut(small=(8, 8, 8), size=9, count=1)
    """
    if fixed_shape:
        full, remainder = divmod(batch_size, minibatch_size)
        return Cut(partial_sizes(remainder, minibatch_size), minibatch_size, full)
    necessary = -(-batch_size // minibatch_size)  # rounded up
    microbatches = min(batch_size, -(-necessary // multiple_of) * multiple_of)
    size, num_larger = divmod(batch_size, microbatches)  # `num_larger` microbatches have one more sample
    if num_larger == 0:
        return Cut((), size, microbatches)
    return Cut((size,) * (microbatches - num_larger), size + 1, num_larger)


@lru_cache(maxsize=4)  # `fit` may try several world sizes for one batch size
def microbatch_counts(batch_size: int, max_minibatch_size: int, *, fixed_shape: bool) -> IntArray:
    """Return the number of microbatches of a step for minibatch_size = 1, 2, ..., `max_minibatch_size`.

    The same as `cut(batch_size, m, ...).microbatches` for every m, but for all m together. With a fixed shape a full
    microbatch is the largest divisor. The divisors of each m come in descending order: m / 1, m / 2, ... in one
    pass a quotient, and the remaining ones in one pass a divisor.

    Returns:
        (max_minibatch_size,), read-only.
    """
    if not fixed_shape:
        return -(-batch_size // np.arange(1, max_minibatch_size + 1))
    remaining = np.full(max_minibatch_size + 1, batch_size)  # samples not yet in a microbatch, by minibatch_size
    counts = np.zeros(max_minibatch_size + 1, dtype=np.int64)  # number of microbatches, by minibatch_size

    def fill_greedily(sizes: slice, divisor: IntArray | int) -> None:
        """Put what remains into as many microbatches of `divisor` samples as it fills, for these minibatch sizes."""
        times, remaining[sizes] = np.divmod(remaining[sizes], divisor)
        counts[sizes] += times

    last_quotient = math.isqrt(max_minibatch_size)
    for quotient in range(1, last_quotient + 1):
        fill_greedily(slice(quotient, None, quotient), np.arange(1, max_minibatch_size // quotient + 1))
    for divisor in range(max_minibatch_size // (last_quotient + 1), 0, -1):
        fill_greedily(slice(divisor * (last_quotient + 1), None, divisor), divisor)
    counts.flags.writeable = False
    return counts[1:]


def count_microbatches(
    batch_sizes: IntArray, minibatch_size: int, *, fixed_shape: bool, multiple_of: int = 1
) -> IntArray:
    """Return the number of microbatches of steps, `cut(...).microbatches`, for batch sizes of any shape.

    >>> count_microbatches(np.array([27, 32, 33, 64]), 32, fixed_shape=True)
    array([4, 1, 2, 2])
    >>> count_microbatches(np.array([2, 27, 33, 129]), 32, fixed_shape=False, multiple_of=4)
    array([2, 4, 4, 8])
    """
    if not fixed_shape:
        necessary = -(-batch_sizes // minibatch_size)
        return np.minimum(batch_sizes, -(-necessary // multiple_of) * multiple_of)
    remaining = batch_sizes  # samples not yet in a microbatch
    counts = np.zeros_like(batch_sizes)
    for divisor in divisors(minibatch_size):  # the largest first, as `partial_sizes` takes them
        times, remaining = np.divmod(remaining, divisor)
        counts = counts + times
    return counts


@lru_cache(maxsize=64)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of `number`, in descending order.

    >>> divisors(12)
    (12, 6, 4, 3, 2, 1)
    """
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]  # up to the root
    return tuple(sorted({*small, *(number // divisor for divisor in small)}, reverse=True))
