"""Batches that arrive while the training runs: what feeds an optimizer without a dataset and a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import numpy as np

from variable_batch_size._validation import MAX_INT, IntArray, check_int, suggests, type_error, value_error
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.backend.detection import resolve_world
from variable_batch_size.data.batches import Batch, Batches, Place, Position
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.plan.packing import first_fit_decreasing
from variable_batch_size.data.plan.plan import Epoch, Plan
from variable_batch_size.data.sampler import TraceLike
from variable_batch_size.data.streams.arrival import rows_in_order
from variable_batch_size.data.streams.rows import Layout, Measure, checked_numbers, digest
from variable_batch_size.data.streams.shards import Shard, Streams
from variable_batch_size.microbatching import Microbatch, count_microbatches
from variable_batch_size.trace.batch_trace import BatchTrace
from variable_batch_size.trace.runs import TraceEndError

_ENDLESS = Epoch(0, 0, MAX_INT, MAX_INT, trace_offset=0, samples_before=0)
_ARRIVES = "batches that arrive"  # in the place of the trace, in a state


@final
class Report(NamedTuple):
    """What one rank tells all ranks of its rows in an update, before any of them computes."""

    step: int  # number of the update
    size: int  # batch size of the trace; 0 without a trace
    shards: list[list[Any]]  # of each that is read: number, available count, whether it has ended, key of its last item
    rows: int  # number of this rank's rows, without rows that count 0
    samples: int  # what these rows count
    necessary: int  # smallest number of microbatches that hold these rows
    can_repeat: bool  # whether the rank has a microbatch that it can repeat
    total: int  # number of rows that were read, also of those that count 0, or are for other ranks
    digest: str  # of these rows, before the first update that this process makes; "" if there is none


@final
class Brought(NamedTuple):
    """The rows that this rank has read for an update, before all ranks know how they are cut into microbatches.

    `ArrivingBatches.arrange` cuts them, given the reports of all ranks.
    """

    given: list[int]  # what each shard gives to the update, over all ranks
    item: Any  # what was read
    chosen: IntArray  # (rows,): which rows of the item count, and are for this rank
    counts: IntArray  # (rows,): what each chosen row counts
    packed: list[IntArray] | None  # the rows of each microbatch, as indices into `chosen`; None if they follow in order
    report: Report


@final
class Agreed(NamedTuple):
    """An update that the ranks have agreed on, until it is made."""

    item: Any  # what this rank has read
    batch: Batch
    parts: list[IntArray]  # the rows of each microbatch of this rank, as indices into the item, without replays
    reports: Sequence[Report]  # of all ranks
    replay: tuple[Any, ...] | None = None  # the microbatch that this rank repeats, once it is known


@final
@dataclass(frozen=True)
class _Unplanned(Batches):
    """The batches of a training that nobody knows before their turn: one epoch without an end.

    Attributes:
        updates: number of updates after which a trace ends the training; None for no end.
    """

    updates: int | None = None
    arriving = True

    def done(self, position: Position) -> bool:
        """Return whether the training has ended with its trace."""
        return self.updates is not None and position.step >= self.updates

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal on all ranks and in a saved run: no trace, as batches arrive as they are."""
        return {**super().fingerprint(), "trace": _ARRIVES}

    def past_before(self, step: int) -> str:
        """Return what a state says of the batches so far: the same for all, as no trace has determined them."""
        return _ARRIVES

    def enter_epoch(self, position: Position, epoch: int) -> Position:
        """Raise ValueError for any epoch but the first."""
        if epoch > 0:
            raise value_error("batches that arrive have one epoch, 0", epoch, "loop over vbs.updates without set_epoch")
        return position

    def state_dict(self, place: Place, *, end_pending: bool) -> dict[str, Any]:
        """Return the state of a training: the next update, and the samples of all updates, which count as one epoch."""
        return {**super().state_dict(place, end_pending=end_pending), "epoch_samples": place.samples}

    def resume(self, state: dict[str, Any], devices: int | None) -> Batches:
        """Return the batches of a training that continues at a saved position: the state decides only the cut."""
        return replace(self, plan=replace(self.plan, fixed_shape=bool(state["fixed_shape"])))


@final
class ArrivingBatches(Dealer):
    """Batches that arrive while the training runs, in the place of a sampler: no dataset, no plan and no epochs.

    Each item that `vbs.updates(batches, optimizer)` reads is one global batch, of which each rank brings its rows: any
    number, also none (`None`, or no rows), and another number than other ranks. Their sum B is the batch size of the
    update, by which the rule scales. The rows of a rank are cut into microbatches; each item must be a tensor whose
    first dimension is the rows, a tuple, list or dict of such, or, with `collate_fn`, a list of rows. The loop ends
    when the batches of all ranks have ended. A step without rows on any rank is left out.

    With `streams` and `trace`, `vbs.updates(source, optimizer)` reads the streams, whose items have any number of rows,
    and update t takes B_t of these: as many of each stream, the first streams one more; where a stream ends, the others
    give more, and the last update has what is left. Which rows it takes, and their order, stream after stream, does not
    depend on the number of ranks. Rank r reads the streams r, r + ranks, ...; if there are fewer streams than ranks,
    each rank reads all and takes its part.

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
        shared: whether each rank is given the whole batch, and takes its part of it.
        trace: batch sizes of streams, as for a `CustomSampler`. With `counts` each stream gives as few rows as count
            its part of B. `on_end="stop"` ends the loop with the trace.
        streams: list of iterables, the same on all ranks. Where one has `state_dict()` and `load_state_dict()`, these
            resume it; where it, or its `dataset`, has `set_epoch()`, this is called with the number of the pass.
        key: function of an item, which returns a str or int that names it, such as the number of a rollout: ranks
            whose keys differ in an update raise an error. Each rank has its part of the same rollout then; of streams,
            those that several ranks read are compared.
        num_replicas: number of ranks. Default, together with `rank`: from `torch.distributed` or PyTorch/XLA.
        rank: this rank.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows, some of them repeated. Default: whether
            the parameters of the optimizer that attaches live on a device that compiles shapes, xla or tpu.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a number is out of range, `max_tokens` lacks lengths, or has a fixed shape, or only one of
            `trace` and `streams` is there.
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
        streams: Sequence[Iterable[Any]] | None = None,
        key: Callable[[Any], str | int] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        fixed_shape: bool | None = None,
    ) -> None:
        """Check the arguments, and begin at the first update of one epoch without an end."""
        if not isinstance(shared, bool):
            raise type_error("shared must be a bool", shared, "pass True if each rank is given the whole batch")
        for name, function in {"lengths": lengths, "counts": counts, "collate_fn": collate_fn, "key": key}.items():
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
        if isinstance(trace, AdaptiveTrace):
            raise type_error("trace must be a batch trace", trace, "pass one; a controller needs a vbs.CustomSampler")
        _check_streams(streams, trace, shared=shared)
        self._max_tokens, self._lengths = max_tokens, lengths or counts
        self.layout = Layout(counts, key, collate_fn)
        self._trace = None if trace is None else BatchTrace.of(trace)
        self.last: Any = None  # a microbatch of an update that was made, in a tuple, which this rank can repeat
        self.agreed: Agreed | None = None  # the update that the ranks have agreed on
        # One epoch without an end. Of this plan only `minibatch_size` and `fixed_shape` describe the batches.
        plan = Plan(BatchTrace.constant(1), MAX_INT, limit, fixed_shape=bool(fixed_shape), begin=_ENDLESS)
        facts = {
            "max_tokens": max_tokens,
            "shared": shared,
            "counts=": counts is not None,
            "key=": key is not None,
            "streams=": 0 if streams is None else len(streams),
            "trace=": None if self._trace is None else self._trace.fingerprint,
        }
        stops = self._trace is not None and self._trace.on_end == "stop"
        last_update = self._trace.steps if self._trace is not None and stops else None
        batches = _Unplanned(plan, resolve_world(rank, num_replicas), shuffle=False, updates=last_update)
        super().__init__(batches, epochs=None, cut_is_known=fixed_shape is not None, facts=facts)
        self.streams = None if streams is None else Streams(streams, self.world, self.layout)
        self._items: Shard | None = None  # the iterator of a loop without streams
        self.whole = shared if self.streams is None else self.streams.whole  # whether each rank has the rows of all

    @property
    def trace(self) -> BatchTrace:
        """The batch trace.

        Raises:
            AttributeError: if there is none.
        """
        if self._trace is None:
            raise AttributeError("batches that arrive have no trace; read optimizer.samples and optimizer.updates")
        return self._trace

    def adopt_state(self, state: dict[str, Any], batches: Batches, *, owned: bool) -> None:
        """Continue at a saved position; the update that the ranks had agreed on before is forgotten.

        Args:
            state: the saved state.
            batches: the batches of the continued training.
            owned: whether an optimizer has loaded the state, and counts from there.
        """
        self.agreed = None
        super().adopt_state(state, batches, owned=owned)

    # What this rank reads, and what all compute. ---------------------------------------------------------------------

    def begin(self, batches: Iterable[Any]) -> None:
        """Begin a loop over `batches`, or continue with it if it is the last loop's iterator, or with the streams.

        If that loop was left before its update was made, the ranks need not agree on this update once more.
        """
        if self.streams is None:
            items = iter(batches)
            if self._items is None or self._items.items is not items:
                self._items, self.agreed = Shard(items, self.layout, batches, by_item=True), None
        if self.agreed is not None and self.agreed.batch.step != self.position.step:
            self.agreed = None

    def read(self) -> Brought | None:
        """Return the rows that this rank brings to the next update; None if all ranks know that all streams ended.

        The result has a report. Ranks exchange their reports before any of them computes: only from all reports follow
        the batch size, and how many microbatches each rank computes.
        """
        if self._max_tokens is not None and self.plan.fixed_shape:
            found = "a device that compiles shapes"
            raise value_error("max_tokens= makes microbatches of any shape", found, "pass minibatch_size=")
        step, size, wanted_by_shard = self.position.step, 0, [1]
        if self._items is not None:  # without streams: an update takes one item
            shards = [[0, self._items.read_until(1, step), self._items.ended, self._items.key]]
            items = self._items.take(1, step)
        else:
            assert self.streams is not None
            # A trace that has ended (size 0) is an error only if the streams have rows: to find out, ask for one row.
            with suppress(TraceEndError):
                size = self.trace.batch_size(step)
            wanted_by_shard = self.streams.shares(max(1, size))
            if not any(wanted_by_shard):
                return None
            items, shards = self.streams.read(wanted_by_shard, step)
        item, plan, rank, ranks = self.layout.join(items), self.plan, self.world.rank, self.world.size
        counts = self.layout.counts_of(item)
        chosen = np.flatnonzero(counts)  # (rows,)
        if self.whole:  # each rank has read the rows of all: take this rank's part
            chosen = chosen[len(chosen) * rank // ranks : len(chosen) * (rank + 1) // ranks]
        necessary = int(count_microbatches(np.array(len(chosen)), plan.minibatch_size, fixed_shape=plan.fixed_shape))
        packed = None
        if self._max_tokens is not None:
            lengths = self._lengths(item) if self._lengths is not None and len(counts) else counts
            packed = first_fit_decreasing(checked_numbers("lengths", lengths, len(counts))[chosen], self._max_tokens)
            necessary = len(packed)
        report = Report(
            step=step,
            size=size,
            shards=shards,
            rows=len(chosen),
            samples=int(counts[chosen].sum()),
            necessary=necessary,
            can_repeat=self.last is not None or len(chosen) > 0,
            total=len(counts),
            digest=digest(item) if self.last is None and ranks > 1 and len(counts) else "",
        )
        return Brought(wanted_by_shard, item, chosen, counts[chosen], packed, report)

    def pass_over(self) -> None:
        """Leave out the items that were read last, because no rank has rows in them."""
        assert self._items is not None
        self._items.drop()

    def arrange(self, brought: Brought, reports: Sequence[Report]) -> Agreed:
        """Return the next update, with the rows of each microbatch of this rank, from the reports of all ranks.

        Each rank calls it with the same reports, so that all agree on the batch size and on the number of microbatches.

        Args:
            brought: the rows of this rank.
            reports: the reports of all ranks.

        Raises:
            ValueError: if a layer needs equal rounds, and a rank has too few rows for them.
        """
        _, item, chosen, counts, microbatch_rows, (step, *_) = brought
        plan, equal_rounds = self.plan, self.dealing.padded
        most = max(report.necessary for report in reports)  # microbatches of a rank
        # Where all ranks compute equally many microbatches, one with fewer rows cuts them into smaller microbatches, as
        # many as the rank that needs most, if it has so many rows. A fixed shape and packing allow no smaller ones.
        splits_further = equal_rounds and not plan.fixed_shape and microbatch_rows is None
        microbatches_by_rank = [min(report.rows, most) if splits_further else report.necessary for report in reports]
        own_microbatches, most = microbatches_by_rank[self.world.rank], max(microbatches_by_rank)
        if self.batches.split.equal_rounds and min(microbatches_by_rank) < most:
            rank = microbatches_by_rank.index(min(microbatches_by_rank))
            raise value_error(
                f"every rank must compute {most} microbatches in update {step}, as a layer communicates",
                f"{reports[rank].rows} rows on rank {rank}",
                "bring at least as many rows on every rank, or leave the update out on all",
            )
        if microbatch_rows is None:
            rounds = max(1, own_microbatches)
            rows, fixed = len(chosen), plan.fixed_shape
            microbatch_rows = rows_in_order(rows, plan.minibatch_size, fixed_shape=fixed, rounds=rounds)
        batch_size = sum(report.samples for report in reports)
        rounds = most if equal_rounds else max(1, own_microbatches)
        # Samples and rows of each microbatch. First those that repeat one with weight 0, so that all ranks compute
        # equally many; with a fixed shape rows may be there several times, and each counts once in the samples.
        sizes = [(0, 1)] * (rounds - own_microbatches)
        sizes += [(int(counts[np.unique(part)].sum()), int(counts[part].sum())) for part in microbatch_rows]
        microbatches = (
            Microbatch(step, batch_size, samples, rows, start=number, number=number, ends_step=number == len(sizes) - 1)
            for number, (samples, rows) in enumerate(sizes)
        )
        batch = Batch(step, batch_size, 0, sum(microbatches_by_rank), tuple(microbatches))
        return Agreed(item, batch, [chosen[part] for part in microbatch_rows], reports)


def _check_streams(streams: object, trace: object, *, shared: bool) -> None:
    """Raise TypeError or ValueError unless there are a trace and a list of streams, or neither."""
    if (streams is None) != (trace is None):
        found = "only streams=" if trace is None else "only trace="
        remedy = "pass ArrivingBatches(streams=[stream], trace=...) to vbs.updates()"
        raise value_error("streams= and trace= must come together", found, remedy)
    if streams is None:
        return
    if not isinstance(streams, (list, tuple)) or not all(isinstance(stream, Iterable) for stream in streams):
        raise type_error("streams must be a list of iterables", streams, "pass [stream] for a single one")
    if not streams or len({*map(id, streams)}) < len(streams):
        found = "one of them twice" if streams else "none"
        raise value_error("streams must be one or several different iterables", found, "give each its part of the rows")
    if shared:
        remedy = "omit it: with one stream all ranks read the same, and take their parts"
        raise value_error("shared= is for batches that arrive whole", "streams=", remedy)
