"""Who computes what: pure functions of (trace, dataset size, epoch, world, microbatch size), in numpy.

A plan knows no device, no seed and no order of samples: it speaks of positions `0 .. samples-1` in the order of an
epoch. `Plan.step` describes one update, to be read; `Plan.deal` describes thousands at once, for speed. They say
the same, which a test holds together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import final

import numpy as np

from variable_batch_size._validation import IntArray, check_int
from variable_batch_size.trace.batch_trace import BatchTrace
from variable_batch_size.world import World

STEPS_AT_ONCE = 4096  # how many steps are looked up together: large enough for numpy, small enough for the first one


@lru_cache(maxsize=1024)
def pieces(rest: int, minibatch_size: int, fixed_shape: bool = True) -> tuple[int, ...]:
    """The sizes into which the `rest` < `minibatch_size` samples of a step are cut, in ascending order.

    With `fixed_shape` every size divides `minibatch_size`, taken greedily, the largest first; else there is one.
    """
    if not fixed_shape:
        return (rest,) if rest else ()
    sizes: list[int] = []
    for divisor in divisors(minibatch_size):
        times, rest = divmod(rest, divisor)
        sizes += [divisor] * times
    return tuple(reversed(sizes))


@lru_cache(maxsize=4)  # of a batch, for several worlds
def counts(batch_size: int, largest: int) -> IntArray:
    """Microbatches of a step for minibatch_size = 1, 2, ..., `largest`, with a fixed shape; (largest,), read-only.

    As `pieces`, a full microbatch being the first divisor, but for all sizes at once. The divisors of each size come
    in descending order: size / 1, size / 2, ... in one pass a quotient, and those that are left in one pass a divisor.
    """
    left, found = np.full(largest + 1, batch_size), np.zeros(largest + 1, dtype=np.int64)

    def take(sizes: slice, divisor: IntArray | int) -> None:
        times, left[sizes] = np.divmod(left[sizes], divisor)
        found[sizes] += times

    last = math.isqrt(largest)
    for quotient in range(1, last + 1):
        take(slice(quotient, None, quotient), np.arange(1, largest // quotient + 1))
    for divisor in range(largest // (last + 1), 0, -1):
        take(slice(divisor * (last + 1), None, divisor), divisor)
    found.flags.writeable = False
    return found[1:]


@lru_cache(maxsize=64)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of `number`, in descending order."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}, reverse=True))


@final
@dataclass(frozen=True, slots=True)
class Epoch:
    """Steps `first_step .. end_step - 1` of the trace, which use `samples` samples of the dataset.

    `trace_offset` is the trace's own count of samples before `first_step`; `samples_before` is the number of
    samples in all earlier epochs.
    """

    number: int
    first_step: int
    end_step: int
    samples: int
    trace_offset: int
    samples_before: int


@final
@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one rank puts through forward and backward at once.

    Attributes:
        step: number of the update it belongs to.
        batch_size: samples of that update, over all ranks.
        samples: distinct samples that count: the weight of this microbatch in a mean; 0 in a replay.
        rows: rows of the tensor that the loader yields.
        start: position of its first sample in the epoch's order.
        ends_step: whether it is this rank's last one before the update.
    """

    step: int
    batch_size: int
    samples: int
    rows: int
    start: int
    ends_step: bool


@final
@dataclass(frozen=True, slots=True)
class Step:
    """One update: `batch_size` samples from position `start` of the epoch's order, and how they are cut.

    `pieces` come first, then full microbatches of `minibatch_size`.
    """

    number: int
    batch_size: int
    start: int
    minibatch_size: int
    pieces: tuple[int, ...]
    fixed_shape: bool

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the update, over all ranks, replays not counted."""
        return len(self.pieces) + self.batch_size // self.minibatch_size

    def rounds(self, world: World) -> int:
        """How many microbatches this rank computes: its share, or one replay when it has none."""
        return max(1, -(-(self.num_microbatches - world.rank) // world.size))

    def microbatch(self, turn: int, world: World) -> Microbatch:
        """This rank's microbatch number `turn` = 0, 1, ..., which is number `rank + turn * size` of the step."""
        number = world.rank + turn * world.size
        replay = number >= self.num_microbatches
        number %= self.num_microbatches
        small = len(self.pieces)
        if number < small:
            size, start = self.pieces[number], sum(self.pieces[:number])
        else:
            size, start = self.minibatch_size, sum(self.pieces) + (number - small) * self.minibatch_size
        return Microbatch(
            step=self.number,
            batch_size=self.batch_size,
            samples=0 if replay else size,
            rows=self.minibatch_size if self.fixed_shape else size,
            start=self.start + start,
            ends_step=turn == self.rounds(world) - 1,
        )


@final
@dataclass(frozen=True, slots=True)
class Deal:
    """The microbatches of one rank in consecutive steps, as arrays over the S steps.

    Attributes:
        first_step: number of the first of these steps.
        ends: (S,) how many microbatches this rank has computed at the end of each.
        counts: (S,) microbatches of the step over all ranks.
        starts: (S,) position of the step's first sample.
        rests: (S,) samples of the step that fill no full microbatch.
    """

    first_step: int
    ends: IntArray
    counts: IntArray
    starts: IntArray
    rests: IntArray
    world: World
    minibatch_size: int
    fixed_shape: bool

    def __len__(self) -> int:
        return int(self.ends[-1])

    def turns(self, begin: int, end: int) -> tuple[IntArray, IntArray]:
        """For microbatches `begin .. end - 1` of the deal: the index of the step (K,), and the turn in it (K,)."""
        number = np.arange(begin, end)
        index = np.searchsorted(self.ends, number, side="right")
        return index, number - np.where(index > 0, self.ends[index - 1], 0)

    def microbatches(self, index: IntArray, turn: IntArray) -> tuple[IntArray, IntArray]:
        """First position (K,) and distinct samples (K,) of microbatches; a replay shows those of what it replays."""
        number = (self.world.rank + turn * self.world.size) % self.counts[index]
        rests, which = np.unique(self.rests[index], return_inverse=True)
        cuts = [pieces(int(rest), self.minibatch_size, self.fixed_shape) for rest in rests]
        lengths = np.array([len(cut) for cut in cuts], dtype=np.int64)
        # All cuts one after another, each with an end mark, so that every lookup below stays inside its own cut.
        sizes = np.array([size for cut in cuts for size in (*cut, 0)], dtype=np.int64)
        before = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        row = (np.cumsum(lengths + 1) - lengths - 1)[which]
        entry = row + np.minimum(number, lengths[which])
        full = np.maximum(number - lengths[which], 0)
        size = np.where(number < lengths[which], sizes[entry], self.minibatch_size)
        start = before[entry] - before[row] + full * self.minibatch_size
        return self.starts[index] + start, size

    def positions(self, start: IntArray, size: IntArray) -> IntArray:
        """The rows of microbatches as positions in the epoch's order, (K, minibatch_size).

        Each sample of a piece of d samples is repeated minibatch_size / d times; without a fixed shape the columns
        from `size` on are padding.
        """
        column = np.arange(self.minibatch_size)
        if self.fixed_shape:
            return start[:, None] + column * size[:, None] // self.minibatch_size
        return start[:, None] + np.minimum(column, size[:, None] - 1)


@final
@dataclass(frozen=True)
class Plan:
    """Which samples make up which update, and who computes them; independent of world, seed and device.

    Args:
        trace: step -> global batch size.
        dataset_size: samples of an epoch.
        minibatch_size: rows of a microbatch, at most.
        drop_last: whether a step that does not fit in what is left of an epoch opens the next one (the tail is left
            out), instead of being shortened to it.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows.

    Raises:
        ValueError: where the numbers do not fit together.
    """

    trace: BatchTrace
    dataset_size: int
    minibatch_size: int
    drop_last: bool = False
    fixed_shape: bool = True
    _latest: list[Epoch] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("dataset_size", "minibatch_size"):
            checked = check_int(getattr(self, name), name, 1, remedy="pass a larger one")
            object.__setattr__(self, name, checked)
        if self.trace.max_batch_size > self.dataset_size:
            raise ValueError(
                f"every batch size of the trace must fit in the dataset, which has {self.dataset_size} samples, "
                f"but the trace has one of {self.trace.max_batch_size}; use a larger dataset or cut the trace's sizes"
            )

    def epoch(self, number: int) -> Epoch:
        """The steps of epoch `number`: epochs follow one another along the trace.

        Raises:
            ValueError: when the trace ends inside the epoch and says that this is an error.
        """
        if number < 0:
            raise ValueError(f"an epoch is a whole number >= 0, got {number}; count epochs from 0")
        if not self._latest or self._latest[0].number > number:
            self._latest[:] = [self._next_epoch(0, 0, 0)]
        while self._latest[0].number < number:
            last = self._latest[0]
            self._latest[:] = [self._next_epoch(last.number + 1, last.end_step, last.samples_before + last.samples)]
        return self._latest[0]

    def _next_epoch(self, number: int, first_step: int, samples_before: int) -> Epoch:
        offset = self.trace.offset(first_step)
        end_sample = offset + self.dataset_size
        self._check_trace_reaches(number, first_step, end_sample)
        end_step = self.trace.step_at(end_sample - 1) + 1
        if self.drop_last and self.trace.offset(end_step) > end_sample:
            end_step -= 1
        samples = min(self.dataset_size, self.trace.offset(end_step) - offset)
        return Epoch(number, first_step, end_step, samples, offset, samples_before)

    def _check_trace_reaches(self, number: int, first_step: int, end_sample: int) -> None:
        trace = self.trace
        if trace.steps is None or trace.on_end != "error" or trace.total_samples >= end_sample:
            return
        missing = end_sample - trace.total_samples
        raise ValueError(
            f"the trace must cover every epoch that is trained, but epoch {number}, which begins at step {first_step}, "
            f"needs {missing} samples more than the trace's {trace.steps} steps give; lengthen the trace, train fewer "
            f'epochs, or say what follows its end with on_end="hold" or on_end="cycle"'
        )

    def step(self, epoch: Epoch, number: int) -> Step:
        """Update `number` of the trace, which lies in `epoch`."""
        start = self.trace.offset(number) - epoch.trace_offset
        batch_size = min(self.trace.batch_size(number), epoch.samples - start)
        rest = pieces(batch_size % self.minibatch_size, self.minibatch_size, self.fixed_shape)
        return Step(number, batch_size, start, self.minibatch_size, rest, self.fixed_shape)

    def samples_before(self, epoch: Epoch, number: int) -> int:
        """Samples of all updates before step `number` of `epoch`, over all epochs and ranks."""
        return epoch.samples_before + min(epoch.samples, self.trace.offset(number) - epoch.trace_offset)

    def deal(self, epoch: Epoch, first_step: int, world: World) -> Deal:
        """A rank's microbatches in the next `STEPS_AT_ONCE` steps of `epoch`, or in those that are left."""
        steps = np.arange(first_step, min(epoch.end_step, first_step + STEPS_AT_ONCE))
        start = self.trace.offset(first_step) - epoch.trace_offset
        ends = np.minimum(start + np.cumsum(self.trace.batch_sizes(steps)), epoch.samples)
        starts = np.concatenate(([start], ends[:-1]))
        full, rests = np.divmod(ends - starts, self.minibatch_size)
        used, which = np.unique(rests, return_inverse=True)
        small = np.array([len(pieces(int(rest), self.minibatch_size, self.fixed_shape)) for rest in used])
        counts = full + small[which]
        rounds = np.maximum(1, -(-(counts - world.rank) // world.size))
        return Deal(first_step, np.cumsum(rounds), counts, starts, rests, world, self.minibatch_size, self.fixed_shape)

    def count(self, epoch: Epoch, first_step: int, world: World) -> int:
        """How many microbatches this rank computes from `first_step` to the end of `epoch`."""
        return sum(len(self.deal(epoch, step, world)) for step in range(first_step, epoch.end_step, STEPS_AT_ONCE))
