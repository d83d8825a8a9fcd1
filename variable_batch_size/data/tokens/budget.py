"""How many tokens the samples of a dataset have, and how many a microbatch may hold. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np

from variable_batch_size._validation import IntArray, as_int, value_error
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.data.plan.packing import (
    first_fit_decreasing,
    padded_evenly,
    padded_groups,
    spread_evenly,
)

_CHUNK = 2**20  # numbers that are hashed at once


@final
@dataclass(frozen=True)
class Budget:
    """How many tokens a microbatch may hold.

    Attributes:
        lengths: number of tokens of each sample of the dataset, (samples,); the user's array, perhaps memory-mapped.
        counts: how many of these tokens count in the loss, (samples,).
        max_tokens: the largest number of tokens that a microbatch holds.
        pad: whether each row is as long as the longest one of its microbatch.
    """

    lengths: IntArray
    counts: IntArray
    max_tokens: int
    pad: bool = False

    @property
    def total(self) -> int:
        """The number of tokens of the whole dataset that count."""
        return int(self.counts.sum())

    def count(self, samples: Sequence[int] | IntArray) -> int:
        """Return how many tokens of some samples count; `samples`: indices in the dataset."""
        return int(self.counts[samples].sum())

    def limit(self, adaptive: AdaptiveTrace) -> AdaptiveTrace:
        """Return an adaptive trace whose controller chooses only batch sizes with which every update has a sample.

        Args:
            adaptive: the trace, with the user's bounds of batch sizes, in tokens.

        Raises:
            ValueError: if the trace's start or lower bound is smaller than that.
        """
        # A step ends at the sample boundary nearest to its size: with twice the longest sample it always has a sample.
        least = min(2 * int(self.counts.max()), self.total)  # tokens
        if adaptive.bounds is None and adaptive.start is None:
            return replace(adaptive, bounds=(least, self.total))
        smallest = adaptive.bounds[0] if adaptive.bounds else adaptive.start
        if smallest is not None and smallest < least:
            requirement = f"with lengths= a controller must choose at least {least} tokens, twice the longest sample"
            raise value_error(requirement, smallest, f"pass bounds=({least}, {self.total}), for example")
        return adaptive if adaptive.bounds else replace(adaptive, bounds=(least, self.total))

    @cached_property
    def digest(self) -> str:
        """A text that is the same for equal lengths and counts; ranks and a restored run compare it."""
        digest = hashlib.sha256()
        for numbers in (self.lengths, self.counts):
            for begin in range(0, len(numbers), _CHUNK):
                digest.update(numbers[begin : begin + _CHUNK].astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def unlike(self) -> list[int]:
        """Return a short and a long sample that fit into a microbatch together, also padded; only sample 0 if none do.

        They are indices in the dataset. A check of the loss runs them together and apart: the losses must agree.
        """
        fitting = np.flatnonzero(self.lengths <= self.max_tokens // 2)
        lengths = self.lengths[fitting]
        return [int(fitting[lengths.argmin()]), int(fitting[lengths.argmax()])] if len(fitting) > 1 else [0]

    def cut(self, samples: IntArray, ranks: int) -> list[IntArray]:
        """Return the samples of each microbatch of a step, (rows,) each.

        Packing determines the number of rounds, in which every rank gets a microbatch. Their microbatches are made
        similar in size, so that no rank waits long. Microbatches whose samples all count 0 come first, then the largest
        ones. Within a microbatch samples keep their order.

        Args:
            samples: the samples of the step, (samples,).
            ranks: number of ranks that share a round; 1 for a cut that does not depend on the number of ranks.
        """
        lengths = self.lengths[samples].astype(np.int64)
        packed = (padded_groups if self.pad else first_fit_decreasing)(lengths, self.max_tokens)
        num_microbatches = min(len(samples), -(-len(packed) // ranks) * ranks)  # rounded up to a multiple of the ranks
        if self.pad:
            microbatches = padded_evenly(lengths, self.max_tokens, num_microbatches)
        else:
            microbatches = spread_evenly(lengths, num_microbatches)
            if max(int(lengths[rows].sum()) for rows in microbatches) > self.max_tokens:  # which packing has avoided
                microbatches = packed
        counts = self.counts[samples]

        def order(rows: IntArray) -> tuple[Any, ...]:  # rows as indices into `samples`
            return counts[rows].any(), -int(lengths[rows].sum()), int(rows[0])

        return [samples[rows] for rows in sorted(microbatches, key=order)]


def checked(name: str, values: Any, size: int, least: int) -> IntArray:
    """Return the numbers that a user passes for all samples, as an array, after checks.

    They are lengths, for example; a memory-mapped array is not copied.

    Args:
        name: the name of the argument, for the error.
        values: what the user has passed.
        size: number of samples.
        least: the smallest number that is allowed.

    Raises:
        TypeError: if they are no integers.
        ValueError: if there is not one number for each sample, or one is too small.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"numbers of {array.dtype}, of shape {array.shape}"
        raise TypeError(f"{name} must be integers, one for each sample, got {found}; convert them, as by int()")
    if len(array) != size:
        raise value_error(f"{name} must have a number for each of the {size} samples", len(array), "pass all of them")
    if len(array) and array.min() < least:
        index = int(array.argmin())
        raise value_error(f"{name} must be >= {least}", f"{array[index]} of sample {index}", "leave the sample out")
    return array


def budget_of(lengths: Any, max_tokens: Any, counts: Any, size: int, *, pad: bool) -> Budget:
    """Return how many tokens samples have and a microbatch may hold, by arguments of a `CustomSampler`.

    Args:
        lengths: number of tokens of each sample, (samples,).
        max_tokens: the most tokens that a microbatch holds.
        counts: how many of the tokens of each sample count in the loss, (samples,); None: all.
        size: number of samples of the dataset.
        pad: whether each row is as long as the longest one of its microbatch.

    Raises:
        TypeError, ValueError: if an argument is not as `CustomSampler` describes it.
    """
    limit = as_int(max_tokens)
    if limit is None or limit < 1:
        requirement = "lengths= needs max_tokens, the most that a microbatch holds, >= 1"
        raise value_error(requirement, repr(max_tokens), "pass what fits into memory")
    lengths = checked("lengths", lengths, size, 1)
    counts = lengths if counts is None else checked("counts", counts, size, 0)
    longest = int(lengths.max())
    if longest > limit:
        index = int(lengths.argmax())
        requirement = f"every sample must have at most max_tokens={limit} tokens"
        raise value_error(requirement, f"{longest} in sample {index}", "shorten the sample, or raise max_tokens")
    if not counts.any():
        raise value_error("counts must have a number > 0", "none", "pass what counts in the loss")
    return Budget(lengths, counts, limit, pad)
