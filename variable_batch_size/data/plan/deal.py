"""Which microbatches a rank computes: `Step` describes one update, `Deal` thousands at once, as NumPy arrays."""

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
    """The part of one rank in a step, or in each of several: numbers, or (steps,).

    Attributes:
        start: position of its first sample in the step; without samples, of the one that it replays.
        samples: its samples, which are consecutive.
        microbatches: number of near-equal microbatches into which they are cut.
        replays: replays before these.
    """

    start: Any
    samples: Any
    microbatches: Any
    replays: Any


class UnequalRanks(Protocol):
    """How ranks share a step that are not equal, as `BySpeed`."""

    @property
    def speeds(self) -> tuple[int, ...]:
        """The relative speed of each rank."""

    @property
    def slowest(self) -> int:
        """A rank whose share is least."""

    def share(self, rank: int, batch_sizes: Any, minibatch_size: int, *, padded: bool) -> Share:
        """Return the share of a rank in steps of these sizes."""

    def count_of_all(self, batch_size: int, minibatch_size: int, *, padded: bool) -> int:
        """Return the number of microbatches of a step over all ranks, without replays."""

    def count_dealt(self, rank: int, microbatches: Any) -> Any:
        """Return how many of the microbatches of a step, or of each of several, a rank takes."""

    def number_in_step(self, rank: int, index: Any) -> Any:
        """Return the number in the step of a rank's microbatch, or of each of several."""


class Dealing(NamedTuple):
    """What the split of steps into microbatches, and of these into rounds, depends on besides the plan.

    Attributes:
        multiple_of: the number of a step's microbatches is a multiple of it, if there are as many samples.
        padded: whether every rank computes equally many microbatches in a step: replays come first on those that have
            one fewer.
        unequal: how ranks share a step that are not equal: its samples; or whole microbatches, if `multiple_of` is 1,
            which must not be padded. None if they are equal.
    """

    multiple_of: int = 1
    padded: bool = False
    unequal: UnequalRanks | None = None

    @property
    def shares_samples(self) -> bool:
        """Whether each rank gets samples in proportion to its speed, and cuts them into microbatches by itself."""
        return self.unequal is not None and self.multiple_of > 1

    def share(self, batch_sizes: Any, minibatch_size: int, world: World) -> Share:
        """Return the share of a rank in a step, or in each of several, if `shares_samples`."""
        assert self.unequal is not None
        return self.unequal.share(world.rank, batch_sizes, minibatch_size, padded=self.padded)

    def count_dealt(self, microbatches: Any, world: World) -> Any:
        """Return how many of the microbatches of a step, or of each of several, are dealt to a rank."""
        if self.unequal is not None:
            return self.unequal.count_dealt(world.rank, microbatches)
        return -(-(microbatches - world.rank) // world.size)

    def number_in_step(self, index: Any, world: World) -> Any:
        """Return the number in the step of a rank's microbatch `index`, or of each of several."""
        if self.unequal is not None:
            return self.unequal.number_in_step(world.rank, index)
        return world.rank + index * world.size

    def replays(self, microbatches: Any, world: World) -> Any:
        """Return how many replays a rank computes before its own microbatches in a step, or in each of several.

        >>> [Dealing(padded=True).replays(5, World(rank, 4)) for rank in range(4)]
        [0, 1, 1, 1]
        """
        last = (microbatches - 1) % world.size  # the rank of the last microbatch
        return (world.rank > last) * self.padded


@final
@dataclass(frozen=True, slots=True)
class Deal:
    """The microbatches of one rank in consecutive steps.

    If ranks get shares of samples, those of the rank are like a step of its own, in a world of one.

    Attributes:
        first_step: number of the first of these steps.
        ends: number of microbatches that this rank has computed at the end of each step.
        counts: number of microbatches of each step over all ranks.
        starts: position of the first sample of each step in the order of the epoch.
        sizes: samples of each step.
        replays: number of replays before the rank's own microbatches in each step.
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
        """Return the step (as an index into this deal) and the round of microbatches `begin .. end - 1` of the deal.

        Returns:
            Two arrays, (microbatches,).
        """
        number = np.arange(begin, end)  # (microbatches,)
        index = np.searchsorted(self.ends, number, side="right")  # (microbatches,)
        return index, number - np.where(index > 0, self.ends[index - 1], 0)

    def microbatches(self, index: IntArray, round_index: IntArray) -> tuple[IntArray, IntArray]:
        """Return the first position and the number of distinct samples of microbatches.

        A replay has those of the microbatch that it repeats.

        Args:
            index: step of each microbatch, as an index into this deal, (microbatches,).
            round_index: round of each microbatch, (microbatches,).

        Returns:
            Two arrays, (microbatches,).
        """
        counts = self.counts[index]  # (microbatches,)
        number = self.dealing.number_in_step(round_index - self.replays[index], self.world) % counts  # (microbatches,)
        start, size = self._deal_fixed(index, number) if self.fixed_shape else self._deal_balanced(index, number)
        return self.starts[index] + start, size

    def _deal_balanced(self, index: IntArray, number: IntArray) -> tuple[IntArray, IntArray]:
        """Return the first sample in the step and the size of microbatches that differ by at most one sample."""
        small, larger = np.divmod(self.sizes[index], self.counts[index])  # (microbatches,) each
        after = np.maximum(number - (self.counts[index] - larger), 0)  # larger microbatches before this one
        return number * small + after, small + (number >= self.counts[index] - larger)

    def _deal_fixed(self, index: IntArray, number: IntArray) -> tuple[IntArray, IntArray]:
        """Return the first sample in the step and the size of microbatches; partial ones come first."""
        in_partial = self.sizes[index] % self.minibatch_size
        remainders, split_of = np.unique(in_partial, return_inverse=True)  # (splits,), (microbatches,)
        splits = [partial_sizes(int(remainder), self.minibatch_size) for remainder in remainders]
        lengths = np.array([len(split) for split in splits], dtype=np.int64)  # (splits,)
        # All splits one after another, each with an end mark, so that every lookup below stays inside its own split.
        sizes = np.array([size for split in splits for size in (*split, 0)], dtype=np.int64)  # (entries,)
        before = np.concatenate(([0], np.cumsum(sizes)[:-1]))  # (entries,)
        row = (np.cumsum(lengths + 1) - lengths - 1)[split_of]  # (microbatches,): first entry of the split
        entry = row + np.minimum(number, lengths[split_of])  # (microbatches,)
        full = np.maximum(number - lengths[split_of], 0)  # (microbatches,): full microbatches before this one
        size = np.where(number < lengths[split_of], sizes[entry], self.minibatch_size)  # (microbatches,)
        return before[entry] - before[row] + full * self.minibatch_size, size

    def rows(self, begin: int, end: int, order: Callable[[IntArray], IntArray]) -> list[list[int]]:
        """Return the samples of microbatches `begin .. end - 1` of the deal, by the order of the epoch."""
        start, size = self.microbatches(*self.locate(begin, end))  # (microbatches,) both
        rows: list[list[int]] = order(self.positions(start, size)).tolist()  # (microbatches, minibatch_size)
        return rows if self.fixed_shape else [row[:n] for row, n in zip(rows, size.tolist(), strict=True)]

    def positions(self, start: IntArray, size: IntArray) -> IntArray:
        """Return the rows of microbatches as positions in the order of the epoch.

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
    """One update: `batch_size` samples from position `start` of the epoch's order, and their cut into microbatches."""

    number: int
    batch_size: int
    start: int
    minibatch_size: int
    cut: Cut
    fixed_shape: bool
    dealing: Dealing

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of the update over all ranks, without replays."""
        unequal, padded = self.dealing.unequal, self.dealing.padded
        if unequal is not None and self.dealing.shares_samples:
            return unequal.count_of_all(self.batch_size, self.minibatch_size, padded=padded)
        return self.cut.microbatches

    def rounds(self, world: World) -> int:
        """Return how many microbatches this rank computes: its share, or one replay if it has none; see `Dealing`."""
        if self.dealing.shares_samples:
            share, _ = self._share_and_cut(world)
            return int(share.microbatches + share.replays)
        return max(1, int(self.dealing.count_dealt(self.cut.microbatches, world)) + self._count_replays(world))

    def _share_and_cut(self, world: World) -> tuple[Share, Cut]:
        return _share_and_cut(self.dealing, self.batch_size, self.minibatch_size, world)

    def _count_replays(self, world: World) -> int:
        return int(self.dealing.replays(self.cut.microbatches, world))

    def microbatch(self, round_index: int, world: World) -> Microbatch:
        """Return this rank's microbatch of a round; replays come first."""
        if self.dealing.shares_samples:
            share, sizes = self._share_and_cut(world)
            first = self.start + share.start
            number = round_index - share.replays
            count = share.microbatches
        else:
            first, sizes, count = self.start, self.cut, self.cut.microbatches
            number = int(self.dealing.number_in_step(round_index - self._count_replays(world), world))
        start, size = sizes.locate(number % sizes.microbatches)
        return Microbatch(
            step=self.number,
            batch_size=self.batch_size,
            samples=size if 0 <= number < count else 0,
            rows=self.minibatch_size if self.fixed_shape else size,
            start=first + start,
            number=number % sizes.microbatches,
            ends_step=round_index == self.rounds(world) - 1,
        )


@lru_cache(maxsize=1024)  # a loop asks for each microbatch
def _share_and_cut(dealing: Dealing, batch_size: int, minibatch_size: int, world: World) -> tuple[Share, Cut]:
    """Return the share of a rank in a step, and its cut; that of one sample, which it replays, if it has none."""
    rank_share = Share(*map(int, dealing.share(batch_size, minibatch_size, world)))
    samples, count = max(1, rank_share.samples), max(1, rank_share.microbatches)
    return rank_share, cut(samples, minibatch_size, fixed_shape=False, multiple_of=count)
