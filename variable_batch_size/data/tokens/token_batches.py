"""Batches in tokens, of a dataset whose samples have lengths: which samples make up a step, and how they are cut.

The plan counts tokens: its epoch has as many as the dataset, and step t nominally has those from O(t) to O(t + 1),
where O is the cumulative sum of the trace within the epoch. A step really begins and ends at the ends of samples that
are nearest to these, in the epoch's order, so that no drift adds up: sums of batch sizes differ from those of the trace
by at most half the longest sample, where no sample is longer than a batch, and more samples than updates are left.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import IntArray, value_error
from variable_batch_size.data.batches import Batch, Batches, Position, position_of
from variable_batch_size.data.plan.shuffle import order
from variable_batch_size.data.tokens.budget import Budget
from variable_batch_size.microbatching import Microbatch

_CHUNK = 2**17  # samples that are ordered at once
_MAX_STORED_CUTS = 64  # steps whose cut is stored, because loader and training both ask for it
_STEPS_PER_DEAL = 8
_MAX_STORED_EPOCHS = 2  # epochs whose order is stored: a loader may read the next one while the last one is trained


def boundaries(ends: IntArray, targets: IntArray) -> IntArray:
    """Return how many samples lie before the end of each step: as many as bring their sum nearest to a target.

    Each step has at least one sample: a boundary lies behind the one before it, and leaves a sample to each later step.

    Args:
        ends: number of tokens of the first i + 1 samples, increasing, (samples,).
        targets: sums of the batch sizes of the first steps, increasing, (boundaries,); at most as many as samples.

    Returns:
        (boundaries,).

    >>> boundaries(np.array([3, 5, 9, 10]), np.array([4, 10]))
    array([1, 4])
    """
    num_samples = np.searchsorted(ends, targets)  # (boundaries,): how many samples end before a target
    end_after = ends[np.minimum(num_samples, len(ends) - 1)]  # (boundaries,): where the next sample ends
    end_before = np.where(num_samples > 0, ends[np.maximum(num_samples, 1) - 1], 0)  # (boundaries,)
    next_is_nearer = end_after - targets < targets - end_before
    num_samples = num_samples + (next_is_nearer & (num_samples < len(ends)))
    index = np.arange(len(targets))
    # At least one more sample than before the last boundary: without the index the numbers must not decrease.
    num_samples = np.maximum.accumulate(np.maximum(num_samples, 1) - index) + index
    return np.minimum(num_samples, len(ends) - (len(targets) - 1 - index))  # and one for each step that follows


@final
@dataclass(frozen=True)
class TokenDeal:
    """The microbatches of one rank in consecutive steps; it has the methods of a `Deal`.

    Attributes:
        first_step: number of the first of these steps.
        ends: number of microbatches that this rank has computed at the end of each step, (steps,).
        samples: the samples of each microbatch, (rows,) each.
    """

    first_step: int
    ends: IntArray
    samples: list[IntArray]

    def __len__(self) -> int:
        return len(self.samples)

    def rows(self, begin: int, end: int, order: object) -> list[list[int]]:
        """Return the samples of microbatches `begin .. end - 1`; they are in the order of the epoch already."""
        return [samples.tolist() for samples in self.samples[begin:end]]


class _Ordered(NamedTuple):
    """The samples of an epoch in its order, and where its steps begin.

    Attributes:
        number: number of the epoch.
        first_step: first step of the epoch.
        samples: indices of the samples in the dataset, in the order of the epoch, (samples,).
        starts: number of samples before each step, and before the end of the last one, (steps + 1,).
        offsets: what these samples count, (steps + 1,).
    """

    number: int
    first_step: int
    samples: NDArray[Any]
    starts: IntArray
    offsets: IntArray


@final
@dataclass(frozen=True)
class TokenBatches(Batches):
    """Batches in tokens: the plan has the tokens of the dataset, and its batch sizes are nominal.

    An epoch takes 4 bytes a sample as long as it is read, and 12 when it begins, or 32 if some samples count 0.

    Attributes:
        budget: the lengths, and how many tokens a microbatch may hold.
    """

    budget: Budget = field(kw_only=True)
    packs = True
    _orders: dict[int, NDArray[Any]] = field(
        default_factory=dict, repr=False, compare=False, kw_only=True
    )  # of any trace
    _epochs: list[_Ordered] = field(default_factory=list, init=False, repr=False, compare=False)
    _cuts: dict[tuple[int, int], list[IntArray]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def _ordered(self, number: int) -> _Ordered:
        """Return the samples of epoch `number` in its order, and where its steps begin.

        Batch sizes in tokens are only nominal: each step ends with the sample that brings the tokens of the epoch so
        far nearest to the sum of the batch sizes.
        """
        for stored in self._epochs:
            if stored.number == number:
                return stored
        epoch = self.plan.epoch(number)
        if number not in self._orders:  # the order does not depend on the trace, and is kept when that grows
            self._orders[number] = self._in_order(number)
            while len(self._orders) > _MAX_STORED_EPOCHS:
                del self._orders[next(iter(self._orders))]
        samples = self._orders[number]
        ends = np.empty(len(samples), np.int64)  # what the first i + 1 samples count
        for begin in range(0, len(samples), _CHUNK):
            counts = self.budget.counts[samples[begin : begin + _CHUNK]]
            ends[begin : begin + _CHUNK] = np.cumsum(counts, dtype=np.int64) + (ends[begin - 1] if begin else 0)
        counted = None  # (counted,): positions of the samples that count; None if all do
        if (ends[1:] == ends[:-1]).any() or not ends[0]:
            # A sample that counts 0 belongs to the step of the sample before it, so that no step counts 0.
            counted = np.flatnonzero(np.diff(ends, prepend=0))
            ends = ends[counted]
        if len(ends) < epoch.updates:
            raise value_error(
                f"an epoch of {epoch.updates} updates needs as many samples that count",
                len(ends),
                "pass a trace of larger batches, in tokens",
            )
        nominal = [self.plan.samples_before(epoch, step) for step in range(epoch.first_step + 1, epoch.end_step + 1)]
        targets = np.array(nominal, dtype=np.int64) - epoch.samples_before
        counted_before = boundaries(ends, targets) if len(targets) else targets  # (steps,): before each step's end
        samples_before = counted_before
        if counted is not None:  # a step ends before the first sample that counts in the next one
            samples_before = np.append(counted, len(samples))[counted_before]
        ordered = _Ordered(
            number,
            epoch.first_step,
            samples,
            starts=np.concatenate(([0], samples_before)),
            offsets=np.concatenate(([0], ends[counted_before - 1])),
        )
        self._epochs[:] = [*self._epochs[1 - _MAX_STORED_EPOCHS :], ordered]
        return ordered

    def _in_order(self, number: int) -> NDArray[Any]:
        """Return the indices of all samples in the order of an epoch, (samples,), in 4 bytes each if possible.

        The order is computed in chunks, so that no array of 8 bytes for each sample is needed.
        """
        size, order = len(self.budget.lengths), self.order(number)
        samples = np.empty(size, np.uint32 if size <= 2**32 else np.int64)
        for begin in range(0, size, _CHUNK):
            samples[begin : begin + _CHUNK] = order(np.arange(begin, min(size, begin + _CHUNK)))
        return samples

    @property
    def dataset_size(self) -> int:
        """The number of samples in the dataset; `plan.dataset_size` is its number of tokens."""
        return len(self.budget.lengths)

    @property
    def in_tokens(self) -> bool:
        """Whether batch sizes are in tokens: some sample counts more than one."""
        return bool(self.budget.counts.max() > 1)

    def check_reference(self, reference: int) -> None:
        """Warn if a reference batch size is less than the longest sample, as if it were in samples, not tokens."""
        longest = int(self.budget.counts.max())
        if reference < longest and self.world.rank == 0:
            mean = self.budget.total / self.dataset_size
            warnings.warn(
                f"With lengths= batch sizes are in tokens, but {reference} is less than the {longest} of one sample; "
                f"multiply batch sizes in samples by {mean:.0f}, the average, in the trace and ref_batchsize",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )

    def order(self, epoch: int) -> Callable[[IntArray], IntArray]:
        """Return the map from positions in an epoch's order to samples, for arrays of any shape."""
        return order(len(self.budget.lengths), self.seed, epoch, shuffle=self.shuffle)

    def parts(self, number: int, step: int) -> list[IntArray]:
        """Return the samples of each microbatch of a step, over all ranks: indices in the dataset, (rows,) each.

        The cuts of some steps are stored, because the loader and the training both ask for them.

        Args:
            number: number of the epoch.
            step: number of the step in the trace.
        """
        ordered = self._ordered(number)
        key = number, step
        if key not in self._cuts:
            index = step - ordered.first_step
            begin, end = ordered.starts[index : index + 2].tolist()
            spreads = self.split.spread and not self.reproducible
            cut = self.budget.cut(ordered.samples[begin:end].astype(np.int64), self.world.size if spreads else 1)
            self._cuts[key] = cut
            while len(self._cuts) > _MAX_STORED_CUTS:
                del self._cuts[next(iter(self._cuts))]
        return self._cuts[key]

    def rows_of(self, epoch: int, microbatch: Microbatch) -> IntArray:
        """Return the samples of a microbatch of this rank, (rows,)."""
        return self.parts(epoch, microbatch.step)[microbatch.number]

    def _numbers_of_rank(self, parts: int) -> list[tuple[int, bool]]:
        """Return which microbatches of a step this rank computes: the number of each, and whether it is a replay.

        A replay repeats a microbatch with weight 0, so that all ranks compute equally many. Replays come first.

        Args:
            parts: number of microbatches of the step, over all ranks.
        """
        rank, ranks = self.world.rank, self.world.size
        numbers = [(number, False) for number in range(rank, parts, ranks)]
        rounds = -(-parts // ranks) if self.split.padded else max(1, len(numbers))  # rounded up
        replays = [(rank % parts, True)] * (rounds - len(numbers))
        return replays + numbers

    def batch(self, position: Position) -> Batch:
        """Return the update at a position as this rank computes it, in tokens."""
        ordered = self._ordered(position.epoch)
        parts = self.parts(*position)
        index = position.step - ordered.first_step
        begin, end = ordered.offsets[index : index + 2].tolist()  # what samples before and after the update count
        numbers = self._numbers_of_rank(len(parts))
        microbatches = []
        for round_index, (number, is_replay) in enumerate(numbers):
            counted = self.budget.count(parts[number])
            microbatches.append(
                Microbatch(
                    step=position.step,
                    batch_size=end - begin,
                    samples=0 if is_replay else counted,
                    rows=max(1, counted),
                    start=begin,
                    number=number,
                    ends_step=round_index == len(numbers) - 1,
                )
            )
        num_counted = sum(bool(self.budget.counts[rows].any()) for rows in parts)  # microbatches that count
        return Batch(position.step, end - begin, begin, num_counted, tuple(microbatches))

    def deal(self, number: int, first_step: int, end_step: int) -> TokenDeal:
        """Return the microbatches of this rank in a few steps of an epoch, from `first_step` on, before `end_step`.

        They are few, because each step has to be cut on its own.
        """
        end = min(end_step, self.plan.epoch(number).end_step, first_step + _STEPS_PER_DEAL)
        rounds, samples = [], []  # number of microbatches of each step; samples of each microbatch
        for step in range(first_step, end):
            parts = self.parts(number, step)
            microbatches = [parts[index] for index, _ in self._numbers_of_rank(len(parts))]
            rounds.append(len(microbatches))
            samples += microbatches
        return TokenDeal(first_step, np.cumsum(rounds), samples)

    def count(self, position: Position) -> int:
        """Return how many microbatches this rank computes from a position to the end of its epoch.

        It takes long: every step has to be cut.
        """
        steps = range(position.step, self.epoch(position).end_step)
        return sum(len(self._numbers_of_rank(len(self.parts(position.epoch, step)))) for step in steps)

    def with_checked_rounds(self) -> Batches:
        """Return these batches; raise ValueError if an optimizer needs a split that microbatches of tokens lack."""
        refused = {
            "fixed_shape=True, as on a device that compiles shapes": self.plan.fixed_shape,
            "equal_rounds=True, as for a layer that communicates in forward": self.split.equal_rounds,
            "speeds=": self.split.unequal is not None,
        }
        for found, is_refused in refused.items():
            if is_refused:
                remedy = "pass minibatch_size= in the place of lengths=, and rows that are padded to one length"
                raise value_error("lengths= makes microbatches of any shape", found, remedy)
        return self

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal on all ranks and in a saved run, by name, besides the cut into microbatches."""
        return {**super().fingerprint(), "lengths or counts": self.budget.digest}

    # A position that is saved. ---------------------------------------------------------------------------------------

    def _count_taken(self, position: Position) -> int:
        """Return how many samples of its epoch the updates before a position have used."""
        index = position.step - self.epoch(position).first_step
        return int(self._ordered(position.epoch).starts[index]) if index else 0

    def position_state(self, position: Position) -> dict[str, Any]:
        """Return a position and what its epoch has used before it, in tokens and, as "taken", in samples."""
        return {**super().position_state(position), "taken": self._count_taken(position)}

    def resume(self, state: dict[str, Any], devices: int | None) -> Batches:
        """Return the batches of a training that continues at a saved position.

        Raises:
            ValueError: if there is no such position, or the steps that follow need samples that the epoch has used.
        """
        batches = super().resume(state, devices)
        taken = state.get("taken")  # None in a state of rows, which strict=False has let in
        if taken is None or state["ended"] or not isinstance(batches, TokenBatches):
            return batches
        # A trace that has changed may move the boundary at the position: later steps need samples, too.
        if batches._count_taken(position_of(state)) != taken:
            requirement = "the rest of an epoch must have a sample for each of its updates"
            remedy = "pass a trace whose next batch sizes are at least twice the longest sample"
            raise value_error(requirement, f"fewer after the {taken} that were trained on", remedy)
        return batches
