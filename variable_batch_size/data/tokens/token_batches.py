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
_KEPT = 64  # steps whose cut is kept, because loader and training both ask for it
_STEPS = 8  # that are dealt at once
_EPOCHS = 2  # whose order is kept, because a loader may read the next one


def boundaries(ends: IntArray, targets: IntArray) -> IntArray:
    """Return how many samples lie before each boundary between steps: the numbers whose ends are nearest to targets.

    Each step has a sample: a boundary lies behind the one before it, and leaves one to each that follows.

    Args:
        ends: tokens of the first i + 1 samples, increasing, (samples,).
        targets: cumulative batch sizes, increasing, (boundaries,); at most as many as samples.

    Returns:
        (boundaries,).

    >>> boundaries(np.array([3, 5, 9, 10]), np.array([4, 10]))
    array([1, 4])
    """
    after = np.searchsorted(ends, targets)  # (boundaries,): samples that end before a target
    behind = ends[np.minimum(after, len(ends) - 1)]
    before = np.where(after > 0, ends[np.maximum(after, 1) - 1], 0)
    number = after + ((behind - targets < targets - before) & (after < len(ends)))
    index = np.arange(len(targets))
    number = np.maximum.accumulate(np.maximum(number, 1) - index) + index
    return np.minimum(number, len(ends) - (len(targets) - 1 - index))


@final
@dataclass(frozen=True)
class TokenDeal:
    """The microbatches of one rank in consecutive steps, as a `Deal`.

    Attributes:
        first_step: number of the first of these steps.
        ends: number of microbatches that this rank has computed at the end of each step, (steps,).
        samples: those of each microbatch, (rows,) each.
    """

    first_step: int
    ends: IntArray
    samples: list[IntArray]

    def __len__(self) -> int:
        return len(self.samples)

    def rows(self, begin: int, end: int, order: object) -> list[list[int]]:
        """Return the samples of microbatches."""
        return [samples.tolist() for samples in self.samples[begin:end]]


class _Ordered(NamedTuple):
    """An epoch in its order.

    Attributes:
        number: of the epoch.
        first_step: of the epoch.
        samples: the samples in their order, (samples,).
        starts: of each step, and the end of the last one, in samples, (steps + 1,).
        offsets: what these count before, (steps + 1,).
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
        """Return an epoch in its order."""
        for known in self._epochs:
            if known.number == number:
                return known
        epoch = self.plan.epoch(number)
        if number not in self._orders:
            self._orders[number] = self._in_order(number)
            while len(self._orders) > _EPOCHS:
                del self._orders[next(iter(self._orders))]
        samples = self._orders[number]
        ends = np.empty(len(samples), np.int64)  # what the first i + 1 samples count
        for begin in range(0, len(samples), _CHUNK):
            counts = self.budget.counts[samples[begin : begin + _CHUNK]]
            ends[begin : begin + _CHUNK] = np.cumsum(counts, dtype=np.int64) + (ends[begin - 1] if begin else 0)
        counted = None
        if (ends[1:] == ends[:-1]).any() or not ends[0]:
            counted = np.flatnonzero(np.diff(ends, prepend=0))  # (counted,): what counts 0 stays with the one before
            ends = ends[counted]
        if len(ends) < epoch.updates:
            raise value_error(
                f"an epoch of {epoch.updates} updates needs as many samples that count",
                len(ends),
                "pass a trace of larger batches, in tokens",
            )
        nominal = [self.plan.samples_before(epoch, step) for step in range(epoch.first_step + 1, epoch.end_step + 1)]
        targets = np.array(nominal, dtype=np.int64) - epoch.samples_before
        behind = boundaries(ends, targets) if len(targets) else targets
        found = _Ordered(
            number,
            epoch.first_step,
            samples,
            np.concatenate(([0], behind if counted is None else np.append(counted, len(samples))[behind])),
            np.concatenate(([0], ends[behind - 1])),
        )
        self._epochs[:] = [*self._epochs[1 - _EPOCHS :], found]
        return found

    def _in_order(self, number: int) -> NDArray[Any]:
        """Return the samples in the order of an epoch, in 4 bytes each if that is possible."""
        size, order = len(self.budget.lengths), self.order(number)
        samples = np.empty(size, np.uint32 if size <= 2**32 else np.int64)
        for begin in range(0, size, _CHUNK):
            samples[begin : begin + _CHUNK] = order(np.arange(begin, min(size, begin + _CHUNK)))
        return samples

    @property
    def dataset_size(self) -> int:
        """The number of samples in the dataset; that of the plan is in tokens."""
        return len(self.budget.lengths)

    @property
    def in_tokens(self) -> bool:
        """Whether batch sizes count more than one for a sample."""
        return bool(self.budget.counts.max() > 1)

    def check_reference(self, reference: int) -> None:
        """Warn if a batch size is smaller than the largest sample, as one in samples often is."""
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
        """Return the samples of each microbatch of a step, over all ranks."""
        ordered = self._ordered(number)
        key = number, step
        if key not in self._cuts:
            index = step - ordered.first_step
            begin, end = ordered.starts[index : index + 2].tolist()
            spreads = self.split.spread and not self.reproducible
            cut = self.budget.cut(ordered.samples[begin:end].astype(np.int64), self.world.size if spreads else 1)
            self._cuts[key] = cut
            while len(self._cuts) > _KEPT:
                del self._cuts[next(iter(self._cuts))]
        return self._cuts[key]

    def rows_of(self, epoch: int, microbatch: Microbatch) -> IntArray:
        """Return the samples of a microbatch of this rank, (rows,)."""
        return self.parts(epoch, microbatch.step)[microbatch.number]

    def _own(self, parts: int) -> list[tuple[int, bool]]:
        """Return the numbers of this rank's microbatches of a step, and whether each is a replay: these come first."""
        rank, ranks = self.world.rank, self.world.size
        own = [(number, False) for number in range(rank, parts, ranks)]
        rounds = -(-parts // ranks) if self.split.padded else max(1, len(own))
        return [(rank % parts, True)] * (rounds - len(own)) + own

    def batch(self, position: Position) -> Batch:
        """Return the update at a position as this rank computes it, in tokens."""
        ordered = self._ordered(position.epoch)
        parts = self.parts(*position)
        index = position.step - ordered.first_step
        begin, end = ordered.offsets[index : index + 2].tolist()
        own = self._own(len(parts))
        microbatches = []
        for turn, (number, is_replay) in enumerate(own):
            counted = self.budget.count(parts[number])
            microbatches.append(
                Microbatch(
                    step=position.step,
                    batch_size=end - begin,
                    samples=0 if is_replay else counted,
                    rows=max(1, counted),
                    start=begin,
                    number=number,
                    ends_step=turn == len(own) - 1,
                )
            )
        groups = sum(bool(self.budget.counts[rows].any()) for rows in parts)
        return Batch(position.step, end - begin, begin, groups, tuple(microbatches))

    def deal(self, number: int, first_step: int, end_step: int) -> TokenDeal:
        """Return this rank's microbatches in the next steps of an epoch, up to `end_step`."""
        end = min(end_step, self.plan.epoch(number).end_step, first_step + _STEPS)
        steps = []
        for step in range(first_step, end):
            parts = self.parts(number, step)
            steps.append([parts[own] for own, _ in self._own(len(parts))])
        return TokenDeal(first_step, np.cumsum([len(rows) for rows in steps]), [one for rows in steps for one in rows])

    def count(self, position: Position) -> int:
        """Return how many microbatches this rank computes from a position to the end of its epoch: all are cut."""
        steps = range(position.step, self.epoch(position).end_step)
        return sum(len(self._own(len(self.parts(position.epoch, step)))) for step in steps)

    def with_checked_rounds(self) -> Batches:
        """Return these batches; raise ValueError if they cannot be as an optimizer needs them."""
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
        """Return what the samplers of all ranks have in common, besides the cut into microbatches."""
        return {**super().fingerprint(), "lengths or counts": self.budget.digest}

    # A position that is saved. ---------------------------------------------------------------------------------------

    def _taken(self, position: Position) -> int:
        """Return how many samples of its epoch lie before a position."""
        index = position.step - self.epoch(position).first_step
        return int(self._ordered(position.epoch).starts[index]) if index else 0

    def position_state(self, position: Position) -> dict[str, Any]:
        """Return a position with the past of its epoch, and with the samples that it has taken."""
        return {**super().position_state(position), "taken": self._taken(position)}

    def resume(self, state: dict[str, Any], devices: int | None) -> Batches:
        """Return the batches of a training that goes on at a saved position.

        Raises:
            ValueError: if there is no such position, or the steps that follow need samples that it has taken.
        """
        batches = super().resume(state, devices)
        taken = state.get("taken")  # None in a state of rows, which strict=False has let in
        if taken is None or state["ended"] or not isinstance(batches, TokenBatches):
            return batches
        if batches._taken(position_of(state)) != taken:
            requirement = "the rest of an epoch must have a sample for each of its updates"
            remedy = "pass a trace whose next batch sizes are at least twice the longest sample"
            raise value_error(requirement, f"fewer after the {taken} that were trained on", remedy)
        return batches
