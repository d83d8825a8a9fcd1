"""Batches that arrive while the training runs: what feeds an optimizer without a dataset and a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import numpy as np
from torch import Tensor

from variable_batch_size._validation import MAX_INT, IntArray, check_int, suggests, type_error, value_error
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.backend.detection import resolve_world
from variable_batch_size.data.batches import Batch, Batches, Place, Position
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.plan.plan import Epoch, Plan
from variable_batch_size.data.sampler import TraceLike
from variable_batch_size.data.streams import rows
from variable_batch_size.data.streams.arrival import (
    Brought,
    batch_of_rows,
    first_fit_decreasing,
    rounds_by_rank,
    rows_in_order,
)
from variable_batch_size.data.streams.stream import Stream
from variable_batch_size.microbatching import count_microbatches
from variable_batch_size.trace.batch_trace import BatchTrace

_ENDLESS = Epoch(0, 0, MAX_INT, MAX_INT, trace_offset=0, samples_before=0)
UNKNOWN: Any = object()
_ARRIVES = "batches that arrive"  # in the place of the trace, in a state

Measure = Callable[[Any], "Sequence[int] | IntArray | Tensor"]


@final
class RankRows(NamedTuple):
    """The rows of this rank in a step; `ArrivingBatches` cuts them."""

    batch: Any
    chosen: IntArray  # (rows,): those that count
    counts: IntArray  # (rows,)
    packed: list[IntArray] | None  # the rows of each microbatch, as indices into `chosen`; None if they follow in order
    brought: Brought


@final
class Item(NamedTuple):
    """What this rank has read for a step, until the ranks have agreed on it."""

    items: Iterator[Any]  # from which it was read
    step: int
    batch: Any


@final
class Arrived(NamedTuple):
    """An update that the ranks have agreed on, until it is made."""

    items: Iterator[Any]  # from which this rank has read its rows
    rows_here: RankRows
    due: Batch
    parts: list[IntArray]  # the rows of each microbatch of this rank
    brought: Sequence[Brought]  # by all ranks
    replay: Any = UNKNOWN  # the microbatch that this rank repeats, if it does


@final
class _Unplanned(Batches):
    """The batches of a training that nobody knows before their turn: one epoch without an end."""

    arriving = True

    def fingerprint(self) -> dict[str, Any]:
        """Return what all ranks have in common."""
        return {**super().fingerprint(), "trace": _ARRIVES}

    def past_before(self, step: int) -> str:
        """Return what a state says of the batches so far."""
        return _ARRIVES

    def enter_epoch(self, position: Position, epoch: int) -> Position:
        """Raise ValueError for any epoch but the first."""
        if epoch > 0:
            raise value_error("batches that arrive have one epoch, 0", epoch, "loop over vbs.updates without set_epoch")
        return position

    def state_dict(self, place: Place, *, end_pending: bool) -> dict[str, Any]:
        """Return a place, with the samples that have arrived."""
        return {**super().state_dict(place, end_pending=end_pending), "epoch_samples": place.samples}

    def resume(self, state: dict[str, Any], devices: int | None) -> Batches:
        """Return the batches of a training that counts on."""
        return replace(self, plan=replace(self.plan, fixed_shape=bool(state["fixed_shape"])))


@final
class ArrivingBatches(Dealer):
    """Batches that arrive while the training runs, in the place of a sampler: no dataset, no plan and no epochs.

    Each item that `vbs.updates(batches, optimizer)` reads is one global batch, of which each rank brings its rows: any
    number, also none (`None`, or no rows), and another number than other ranks. Their sum B is the batch size of the
    update, by which the rule scales. The rows of a rank are cut into microbatches; each item must be a tensor whose
    first dimension is the rows, a tuple, list or dict of such, or, with `collate_fn`, a list of rows. The loop ends
    when the batches of all ranks have ended. A step without rows on any rank is left out.

    Ranks exchange their numbers of rows before each step, through the store. Where they compute equally many
    microbatches, and where a rank has no rows, it repeats one with weight 0: `optimizer.microbatch.samples` is 0 then.

    Args:
        minibatch_size: maximum number of rows of a microbatch. Default: 32, or any number with `max_tokens`.
        max_tokens: maximum sum of the lengths of the rows of a microbatch; rows are packed first-fit decreasing.
        lengths: function of an item, which returns the length of each row, >= 0. Default: its `counts`, which are less
            where not every token counts.
        counts: function of an item, which returns what each row counts, an integer >= 0, such as its tokens with a
            label: then the loss of a microbatch is a mean over what its rows count, and batch sizes, `ref_batchsize`
            and `optimizer.samples` are in that unit. Rows that count 0 are left out. Default: each row counts 1.
        collate_fn: function of a list of rows, which returns a microbatch.
        shared: whether each rank is given the whole batch, or the whole stream, and takes its part of it.
        trace: batch sizes, as for a `CustomSampler`: the items are parts of a stream then, of any number of rows, and
            an update takes B of them, as many on each rank; where a stream ends, the others give more, and the last
            update has what is left. With `counts` it takes as few rows as count B / world on each rank. `on_end="stop"`
            ends the loop with the trace.
        num_replicas: number of ranks. Default, together with `rank`: that of `torch.distributed` or PyTorch/XLA.
        rank: this rank.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows, some of them repeated. Default: whether
            the parameters of the optimizer that attaches live on a device that compiles shapes, xla or tpu.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a number is out of range, or `max_tokens` lacks lengths, or has a fixed shape.
    """

    @suggests
    def __init__(
        self,
        minibatch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        lengths: Measure | None = None,
        counts: Measure | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shared: bool = False,
        trace: TraceLike | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        fixed_shape: bool | None = None,
    ) -> None:
        if not isinstance(shared, bool):
            raise type_error("shared must be a bool", shared, "pass True if each rank is given the whole batch")
        for name, function in {"lengths": lengths, "counts": counts, "collate_fn": collate_fn}.items():
            if function is not None and not callable(function):
                raise type_error(f"{name} must be a function of an item", function, "pass a function")
        limit = 32 if minibatch_size is None else check_int(minibatch_size, "minibatch_size", 1)
        if max_tokens is not None:
            max_tokens = check_int(max_tokens, "max_tokens", 1)
            if lengths is None and counts is None:
                raise value_error("max_tokens= needs the lengths of the rows", "none", "pass lengths= or counts=")
            if minibatch_size is not None or fixed_shape:
                found = "minibatch_size=" if minibatch_size is not None else "fixed_shape=True"
                raise value_error("max_tokens= bounds microbatches of any number of rows", found, "pass only one")
        self._max_tokens = max_tokens
        self._lengths = lengths or counts
        self._counts = counts
        self._collate, self.shared = collate_fn, shared
        if isinstance(trace, AdaptiveTrace):
            raise type_error("trace must be a batch trace", trace, "pass one; a controller needs a vbs.CustomSampler")
        self._trace = None if trace is None else BatchTrace.of(trace)
        self.stream: Stream | None = None  # that is read
        self.last: Any = None  # a microbatch of an update that was made, which this rank can repeat
        self.item: Item | None = None  # what was read last
        self.arrived: Arrived | None = None  # the update that is due, once the ranks have said what they bring
        self.streams_have_state = False  # whether a loop over streams can save where they are
        plan = Plan(BatchTrace.constant(1), MAX_INT, limit, fixed_shape=bool(fixed_shape), begin=_ENDLESS)
        named = {"max_tokens": max_tokens, "shared": shared, "counts=": counts is not None}
        facts = {**named, "trace=": None if self._trace is None else self._trace.fingerprint}
        batches = _Unplanned(plan, resolve_world(rank, num_replicas), shuffle=False)
        super().__init__(batches, epochs=None, cut_is_known=fixed_shape is not None, facts=facts)

    @property
    def has_trace(self) -> bool:
        """Whether a trace says how many rows of a stream an update takes."""
        return self._trace is not None

    @property
    def trace(self) -> BatchTrace:
        """The batch trace.

        Raises:
            AttributeError: if there is none.
        """
        if self._trace is None:
            raise AttributeError("batches that arrive have no trace; read optimizer.samples and optimizer.updates")
        return self._trace

    def ends_at(self, updates: int) -> bool:
        """Return whether the trace ends the training after this number of updates."""
        trace = self._trace
        return trace is not None and trace.on_end == "stop" and trace.steps is not None and updates >= trace.steps

    def adopt_state(self, state: dict[str, Any], batches: Batches, *, owned: bool) -> None:
        """Go on at a saved position, as `Dealer.adopt_state`; another update is due then."""
        self.item = self.arrived = None
        super().adopt_state(state, batches, owned=owned)

    def is_due(self, items: Iterator[Any]) -> bool:
        """Return whether the next update is one that the ranks have agreed on, with rows of this iterator."""
        arrived = self.arrived
        return arrived is not None and arrived.items is items and arrived.due.step == self.position.step

    def read_stream(self, items: Iterator[Any], kept: Any) -> None:
        """Read the stream of this rank, which begins with rows that were kept, or goes on with an iterator."""
        if self.stream is None or self.stream.items is not items or kept is not None:
            self.stream = Stream(items, self._counts_of_rows, collated=self._collate is not None, kept=kept)

    def _counts_of_rows(self, batch: Any) -> IntArray:
        """Return what each row of an item counts, (rows,): 1 without `counts`."""
        if self._collate is None:
            number = rows.count_rows(batch)
        elif batch is None or (isinstance(batch, Sequence) and not isinstance(batch, str)):
            number = len(batch or ())
        else:
            raise type_error("with collate_fn= each item must be a list of rows", batch, "pass a list, or omit it")
        if self._counts is None or not number:
            return np.ones(number, dtype=np.int64)
        return _checked_numbers("counts", self._counts(batch), number)

    def bring_rows(self, batch: Any, *, ended: bool, can_replay: bool) -> RankRows:
        """Return the rows of this rank in the next step, with what the other ranks are told of them."""
        if self._max_tokens is not None and self.plan.fixed_shape:
            found = "a device that compiles shapes"
            raise value_error("max_tokens= makes microbatches of any shape", found, "pass minibatch_size=")
        counts = self._counts_of_rows(batch)
        world = self.world
        number = len(counts)
        bounds = (number * world.rank // world.size, number * (world.rank + 1) // world.size)
        index = np.arange(*bounds) if self.shared else np.arange(number)  # (rows,)
        index = index[counts[index] > 0]
        counts = counts[index]
        packed = None
        plan = self.plan
        necessary = count_microbatches(np.array(len(index)), plan.minibatch_size, fixed_shape=plan.fixed_shape)
        if self._max_tokens is not None:
            assert self._lengths is not None
            lengths = _checked_numbers("lengths", self._lengths(batch), number)[index] if number else index
            packed = first_fit_decreasing(lengths, self._max_tokens)
            necessary = np.array(len(packed))
        brought = Brought(len(index), int(counts.sum()), int(necessary), ended, can_replay or len(index) > 0, number)
        return RankRows(batch, index, counts, packed, brought)

    def arrange_update(self, rows_here: RankRows, brought: Sequence[Brought]) -> tuple[Batch, list[IntArray]]:
        """Return the next update, and the rows of each microbatch of this rank; `brought`: by all ranks."""
        plan, step = self.plan, self.position.step
        equal = self.dealing.padded
        fixed = plan.fixed_shape or rows_here.packed is not None
        by_rank = rounds_by_rank(brought, fixed=fixed, equal=equal)
        needed = by_rank[self.world.rank]
        most = max(by_rank)
        if self.batches.split.equal_rounds and min(by_rank) < most:
            raise _unequal_rounds_error(step, by_rank, brought)
        parts = rows_here.packed
        if parts is None:
            rounds = max(1, needed)
            fixed_shape = plan.fixed_shape
            parts = rows_in_order(len(rows_here.chosen), plan.minibatch_size, fixed_shape=fixed_shape, rounds=rounds)
        distinct = [np.unique(part) for part in parts] if plan.fixed_shape else parts
        samples = [int(rows_here.counts[part].sum()) for part in distinct]
        repeats = [len(part) // len(once) for part, once in zip(parts, distinct, strict=True)]
        rows = [n * times for n, times in zip(samples, repeats, strict=True)]
        replays = max(most if equal else 1, needed) - needed
        batch = batch_of_rows(step, sum(of_rank.samples for of_rank in brought), sum(by_rank), samples, rows, replays)
        return batch, [rows_here.chosen[part] for part in parts]

    def microbatch(self, batch: Any, index: IntArray) -> Any:
        """Return these rows of an item as a microbatch."""
        if self._collate is not None:
            return self._collate([batch[number] for number in index.tolist()])
        return rows.take_rows(batch, index)


def _checked_numbers(name: str, returned: Any, number: int) -> IntArray:
    """Return what a user's function has returned for each row, (rows,)."""
    values = np.asarray(returned.cpu() if isinstance(returned, Tensor) else returned)
    if values.shape != (number,) or values.dtype.kind not in "iub" or (values < 0).any():
        found = f"{values.dtype} of shape {values.shape}" if values.shape != (number,) else f"{values.min()}"
        raise value_error(f"{name}= must return an integer >= 0 for each of {number} rows", found, "count its tokens")
    return values.astype(np.int64)


def _unequal_rounds_error(step: int, by_rank: Sequence[int], brought: Sequence[Brought]) -> ValueError:
    """Return the error of ranks that need equal rounds, but make these numbers of microbatches."""
    rank = by_rank.index(min(by_rank))
    return value_error(
        f"every rank must compute {max(by_rank)} microbatches in update {step}, because a layer communicates in "
        f"forward",
        f"{brought[rank].rows} rows on rank {rank}",
        "bring at least as many rows on every rank, or leave the update out on all of them",
    )
