"""Which microbatches a rank computes: `Step` describes one update, `Deal` thousands at once, as NumPy arrays.

The microbatches of an update are dealt to ranks in turns, like cards: in each round every rank gets the next one. A
replay is a microbatch that a rank repeats with weight 0, so that it takes part in as many rounds as the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from variable_batch_size._validation import IntArray
from variable_batch_size.microbatching import Cut, Microbatch, cut, partial_sizes
from variable_batch_size.world import World


class Share(NamedTuple):
    """The part of one rank in a step, as numbers; or in each of several steps, as arrays, (steps,).

    Attributes:
        start: position in the step of the rank's first sample; if it has none, of the sample that it replays.
        samples: number of the rank's samples, which are consecutive.
        microbatches: number of near-equal microbatches into which these samples are cut.
        replays: number of replays before these microbatches.
    """

    start: Any
    samples: Any
    microbatches: Any
    replays: Any


class UnequalRanks(Protocol):
    """How ranks of unequal speed share a step; `BySpeed` is the implementation."""

    @property
    def speeds(self) -> tuple[int, ...]:
        """The relative speed of each rank."""

    @property
    def slowest(self) -> int:
        """A rank whose share is smallest."""

    def share(self, rank: int, batch_sizes: Any, minibatch_size: int, *, padded: bool) -> Share:
        """Return the share of a rank in steps of these sizes."""

    def count_of_all(self, batch_size: int, minibatch_size: int, *, padded: bool) -> int:
        """Return the number of microbatches of a step over all ranks, without replays."""

    def count_dealt(self, rank: int, microbatches: Any) -> Any:
        """Return how many of the microbatches of a step, or of each of several, a rank takes."""

    def number_in_step(self, rank: int, index: Any) -> Any:
        """Return which microbatch of the step is the rank's microbatch `index`; both count from 0, or are arrays."""


class Dealing(NamedTuple):
    """How steps are split into microbatches, and these into rounds, as far as the plan does not say it.

    Attributes:
        multiple_of: the number of a step's microbatches is a multiple of this number, if the step has as many samples.
        padded: whether every rank computes equally many microbatches in a step: ranks that have one fewer begin with a
            replay.
        unequal: how ranks of unequal speed share a step; None if all are equally fast. They share its samples; but
            whole microbatches if `multiple_of` is 1, where `padded` must be False.
    """

    multiple_of: int = 1
    padded: bool = False
    unequal: UnequalRanks | None = None

    @property
    def shares_samples(self) -> bool:
        """Whether each rank gets samples in proportion to its speed, and cuts them into microbatches by itself."""
        return self.unequal is not None and self.multiple_of > 1

    def share(self, batch_sizes: Any, minibatch_size: int, world: World) -> Share:
        """Return which samples of a step, or of each of several, a rank of unequal speed gets, and how it cuts them.

        Call it only if `shares_samples`.

        Args:
            batch_sizes: samples of the step over all ranks: a number, or an array, (steps,).
            minibatch_size: maximum number of rows of a microbatch.
            world: the rank, and the number of ranks.
        """
        assert self.unequal is not None
        return self.unequal.share(world.rank, batch_sizes, minibatch_size, padded=self.padded)

    def count_dealt(self, microbatches: Any, world: World) -> Any:
        """Return how many of the microbatches of a step, or of each of several, a rank computes, without replays.

        Ranks take the microbatches in turns, like cards: of 5 microbatches on 2 ranks, rank 0 computes 0, 2 and 4.

        Args:
            microbatches: number of microbatches of the step over all ranks: a number, or an array, (steps,).
            world: the rank, and the number of ranks.
        """
        if self.unequal is not None:
            return self.unequal.count_dealt(world.rank, microbatches)
        return -(-(microbatches - world.rank) // world.size)  # rounded up: the numbers rank, rank + size, ...

    def number_in_step(self, index: Any, world: World) -> Any:
        """Return which microbatch of a step a rank computes as its microbatch `index`: numbers from 0, or arrays.

        Ranks take the microbatches in turns: with 2 ranks, rank 1 computes the microbatches 1, 3, 5, ... of the step.
        """
        if self.unequal is not None:
            return self.unequal.number_in_step(world.rank, index)
        return world.rank + index * world.size

    def replays(self, microbatches: Any, world: World) -> Any:
        """Return how many replays a rank computes before its own microbatches in a step, or in each of several.

        A replay is a microbatch that a rank repeats with weight 0, so that all ranks compute equally many: of 5
        microbatches on 4 ranks, rank 0 gets two, and each of the others gets one and a replay.

        Args:
            microbatches: number of microbatches of the step over all ranks: a number, or an array, (steps,).
            world: the rank, and the number of ranks.

        >>> [Dealing(padded=True).replays(5, World(rank, 4)) for rank in range(4)]
        [0, 1, 1, 1]
        """
        last_rank = (microbatches - 1) % world.size  # the rank that gets the last microbatch
        gets_one_fewer = world.rank > last_rank  # a bool, or an array of bools, (steps,)
        return gets_one_fewer * self.padded  # times a bool: 0 or 1 for each step


@final
@dataclass(frozen=True, slots=True)
class Deal:
    """The microbatches of one rank in consecutive steps.

    If ranks share samples, the share of the rank counts as a step, in a world of one rank.

    Attributes:
        first_step: number of the first of these steps.
        ends: number of microbatches that this rank has computed at the end of each step, since the first one.
        counts: number of microbatches of each step over all ranks.
        starts: position of the first sample of each step in the order of the epoch.
        sizes: number of samples of each step.
        replays: number of replays before the rank's own microbatches in each step.
        world: this rank, and the number of ranks.
        minibatch_size: maximum number of rows of a microbatch.
        fixed_shape: whether every microbatch has exactly that many rows.
        dealing: how steps are split.
    """

    first_step: int
    ends: IntArray  # (steps,)
    counts: IntArray  # (steps,)
    starts: IntArray  # (steps,)
    sizes: IntArray  # (steps,)
    replays: IntArray  # (steps,)
    world: World
    minibatch_size: int
    fixed_shape: bool
    dealing: Dealing

    def __len__(self) -> int:
        return int(self.ends[-1])

    def locate(self, begin: int, end: int) -> tuple[IntArray, IntArray]:
        """Return the step and the round of microbatches `begin .. end - 1` of this rank, counted from the first step.

        A round is one microbatch on each rank: the round of a microbatch is its number in the step on this rank.

        Returns:
            Two arrays, (microbatches,): the step of each microbatch, as an index into this deal; and its round, from 0.
        """
        microbatch = np.arange(begin, end)  # (microbatches,)
        step = np.searchsorted(self.ends, microbatch, side="right")  # (microbatches,)
        before_step = np.where(step > 0, self.ends[step - 1], 0)  # (microbatches,): microbatches of earlier steps
        return step, microbatch - before_step

    def microbatches(self, step: IntArray, round_index: IntArray) -> tuple[IntArray, IntArray]:
        """Return the position of the first sample, and the number of distinct samples, of each microbatch.

        A replay has the samples of the microbatch that it repeats.

        Args:
            step: step of each microbatch, as an index into this deal, (microbatches,).
            round_index: round of each microbatch, (microbatches,).

        Returns:
            Two arrays, (microbatches,).
        """
        # A replay has a negative number, or one beyond the last microbatch: modulo makes it one of the step.
        number = self.dealing.number_in_step(round_index - self.replays[step], self.world)  # (microbatches,)
        microbatch = number % self.counts[step]  # (microbatches,)
        start, size = self._cut_fixed(step, microbatch) if self.fixed_shape else self._cut_balanced(step, microbatch)
        return self.starts[step] + start, size

    def _cut_balanced(self, step: IntArray, microbatch: IntArray) -> tuple[IntArray, IntArray]:
        """Return where in its step each microbatch begins, and its size; sizes of a step differ by at most one sample.

        For a step of B samples in c microbatches, B = c s + l with 0 <= l < c: the first c - l have s samples, the
        others s + 1.

        Args:
            step: step of each microbatch, as an index into this deal, (microbatches,).
            microbatch: its number in the step, over all ranks, (microbatches,).

        Returns:
            Two arrays, (microbatches,).
        """
        smaller_size, num_larger = np.divmod(self.sizes[step], self.counts[step])  # of the step, (microbatches,) each
        first_larger = self.counts[step] - num_larger  # (microbatches,): the larger ones come last
        larger_before = np.maximum(microbatch - first_larger, 0)  # (microbatches,)
        return microbatch * smaller_size + larger_before, smaller_size + (microbatch >= first_larger)

    def _cut_fixed(self, step: IntArray, microbatch: IntArray) -> tuple[IntArray, IntArray]:
        """Return where in its step each microbatch begins, and its distinct samples; the shape is fixed.

        What is left of the step beyond full microbatches is split into partial ones, which come first. How the
        remainder is split depends on it alone: each remainder that occurs is split once, and its sizes are looked up.

        Args:
            step: as for `_cut_balanced`.
            microbatch: as for `_cut_balanced`.

        Returns:
            Two arrays, (microbatches,).
        """
        in_partial = self.sizes[step] % self.minibatch_size  # (microbatches,): samples of the step in partial ones
        remainders, split_of = np.unique(in_partial, return_inverse=True)  # (splits,), (microbatches,)
        splits = [partial_sizes(int(remainder), self.minibatch_size) for remainder in remainders]
        lengths = np.array([len(split) for split in splits], dtype=np.int64)  # (splits,)
        # All splits one after another, each with an end mark, so that every lookup below stays inside its own split.
        sizes = np.array([size for split in splits for size in (*split, 0)], dtype=np.int64)  # (entries,)
        samples_before = np.concatenate(([0], np.cumsum(sizes)[:-1]))  # (entries,): samples of all entries before
        first_entry = (np.cumsum(lengths + 1) - lengths - 1)[split_of]  # (microbatches,): of the split
        entry = first_entry + np.minimum(microbatch, lengths[split_of])  # (microbatches,)
        full_before = np.maximum(microbatch - lengths[split_of], 0)  # (microbatches,): full ones before this one
        size = np.where(microbatch < lengths[split_of], sizes[entry], self.minibatch_size)  # (microbatches,)
        return samples_before[entry] - samples_before[first_entry] + full_before * self.minibatch_size, size

    def rows(self, begin: int, end: int, order: Callable[[IntArray], IntArray]) -> list[list[int]]:
        """Return the samples of microbatches `begin .. end - 1` of this deal.

        Args:
            begin: first microbatch.
            end: microbatch after the last one.
            order: map from positions in the order of the epoch to indices in the dataset.
        """
        start, size = self.microbatches(*self.locate(begin, end))  # (microbatches,) both
        rows: list[list[int]] = order(self.positions(start, size)).tolist()  # (microbatches, minibatch_size)
        if self.fixed_shape:
            return rows
        return [row[:length] for row, length in zip(rows, size.tolist(), strict=True)]  # without the padding

    def positions(self, start: IntArray, size: IntArray) -> IntArray:
        """Return the position in the order of the epoch of each row of each microbatch.

        With a fixed shape each sample of a partial microbatch of d samples is repeated minibatch_size / d times;
        otherwise the columns from `size` on are padding.

        Args:
            start: first position of each microbatch, (microbatches,).
            size: distinct samples of each microbatch, (microbatches,).

        Returns:
            (microbatches, minibatch_size).
        """
        column = np.arange(self.minibatch_size)  # (rows,)
        if self.fixed_shape:
            return start[:, None] + column * size[:, None] // self.minibatch_size
        return start[:, None] + np.minimum(column, size[:, None] - 1)


@final
@dataclass(frozen=True, slots=True)
class Step:
    """One update: `batch_size` samples from position `start` of the epoch's order, and their cut into microbatches.

    `number` is its step in the trace; `cut` is over all ranks, and unused if ranks share samples, see `Dealing`.
    """

    number: int
    batch_size: int
    start: int
    minibatch_size: int
    cut: Cut
    fixed_shape: bool
    dealing: Dealing

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches into which the samples of this update are cut, over all ranks.

        Replays, which a rank computes with weight 0 so that all ranks make equally many, are not counted.
        """
        unequal, padded = self.dealing.unequal, self.dealing.padded
        if unequal is not None and self.dealing.shares_samples:
            return unequal.count_of_all(self.batch_size, self.minibatch_size, padded=padded)
        return self.cut.microbatches

    def rounds(self, world: World) -> int:
        """Return how many microbatches a rank computes in this update, replays included; at least one.

        A replay is a microbatch that a rank repeats with weight 0, so that it takes part in as many rounds as the
        others. See `Dealing` for when ranks have any.
        """
        if self.dealing.shares_samples:
            share, _ = self._share_and_cut(world)
            return int(share.microbatches + share.replays)
        dealt = int(self.dealing.count_dealt(self.cut.microbatches, world))  # the rank's own microbatches
        return max(1, dealt + self._count_replays(world))

    def _share_and_cut(self, world: World) -> tuple[Share, Cut]:
        return _share_and_cut(self.dealing, self.batch_size, self.minibatch_size, world)

    def _count_replays(self, world: World) -> int:
        return int(self.dealing.replays(self.cut.microbatches, world))

    def microbatch(self, round_index: int, world: World) -> Microbatch:
        """Return the microbatch that a rank computes in a round of this update; replays come first, with weight 0.

        A replay repeats a microbatch, so that all ranks compute equally many.

        Args:
            round_index: the round, from 0 to `rounds(world)` - 1: which of the rank's microbatches.
            world: the rank, and the number of ranks.
        """
        if self.dealing.shares_samples:  # the rank has consecutive samples, which it cuts into microbatches by itself
            share, sizes = self._share_and_cut(world)
            first_sample = self.start + share.start
            number = round_index - share.replays
            num_microbatches = share.microbatches
        else:
            first_sample, sizes, num_microbatches = self.start, self.cut, self.cut.microbatches
            number = int(self.dealing.number_in_step(round_index - self._count_replays(world), world))
        # A replay has a number that is negative, or too large: it repeats the microbatch that modulo gives.
        start, size = sizes.locate(number % sizes.microbatches)
        return Microbatch(
            step=self.number,
            batch_size=self.batch_size,
            samples=size if 0 <= number < num_microbatches else 0,  # a replay has the weight 0
            rows=self.minibatch_size if self.fixed_shape else size,
            start=first_sample + start,
            number=number % sizes.microbatches,
            ends_step=round_index == self.rounds(world) - 1,
        )


@lru_cache(maxsize=1024)  # a loop asks for each microbatch
def _share_and_cut(dealing: Dealing, batch_size: int, minibatch_size: int, world: World) -> tuple[Share, Cut]:
    """Return the part of a rank in a step whose ranks differ in speed, and how the rank cuts it into microbatches.

    A rank without samples has the cut of a single sample, which it replays with weight 0.

    Args:
        dealing: how ranks of unequal speed share a step.
        batch_size: samples of the step over all ranks.
        minibatch_size: maximum number of rows of a microbatch.
        world: the rank, and the number of ranks.
    """
    rank_share = Share(*map(int, dealing.share(batch_size, minibatch_size, world)))
    samples, count = max(1, rank_share.samples), max(1, rank_share.microbatches)
    return rank_share, cut(samples, minibatch_size, fixed_shape=False, multiple_of=count)
