"""The loop over batches that arrive, or over streams of rows; `updates` returns it."""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.data.batches import Batch
from variable_batch_size.data.streams import workers
from variable_batch_size.data.streams.arrival import Brought
from variable_batch_size.data.streams.arriving import UNKNOWN, Arrived, ArrivingBatches, Item, RankRows
from variable_batch_size.data.streams.stream import Stream, shares
from variable_batch_size.data.training import Phase
from variable_batch_size.optim.loops.counts import Count
from variable_batch_size.optim.loops.yielded_update import Update, incomplete_update, stale_loop
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.trace.runs import TraceEndError

T = TypeVar("T")

_CALL = "the next update of vbs.updates"
_SHARES = "the next update of vbs.updates, of streams with a trace"
_STATE = "state_dict() of vbs.updates"
_NO_MORE: Any = object()


@final
class Arrivals(Generic[T]):
    """The updates of batches that arrive; see `updates`.

    With a trace its state, which can be a part of a `Checkpoint`, is that of the streams of all ranks.
    """

    def __init__(
        self, batches: Iterable[T], optimizer: CustomOptimizer, source: ArrivingBatches, counts: Count | None = None
    ) -> None:
        if not isinstance(batches, Iterable):
            raise type_error("batches must be iterable", batches, "pass this rank's part of each batch, in their order")
        self._batches, self._optimizer, self._source, self._counts = batches, optimizer, source, counts
        source.streams_have_state |= source.has_trace and callable(getattr(batches, "state_dict", None))
        self._items: Iterator[T] | None = None  # that are read
        self._last_microbatch: Any = None  # of those that were handed out
        self._restored_rows: Any = None  # rows that a restored state had read
        self._restored_ended = False  # whether its stream had no more

    def __iter__(self) -> Iterator[Update[T]]:
        """Yield an update for each batch that has rows on any rank."""
        optimizer, source, training = self._optimizer, self._source, self._source.training
        training.go_on()
        if optimizer.inside_step:
            raise incomplete_update(optimizer.updates)
        training.note_iteration()
        items = workers.read_and_compare(self._batches)
        restarts = training.restarts
        if source.has_trace:
            self._read_from(items)
        rows_of_steps = self._rows_of_steps(items)
        while not source.ends_at(optimizer.updates):
            if not source.is_due(items):  # else its step was discarded, perhaps on this rank alone
                arrived = self._next_arrived(items, rows_of_steps)
                if arrived is None:
                    return
                source.arrived = arrived
            arrived = self._complete_arrived()
            due = arrived.due
            training.expected, training.handed_out = due, 0
            yield Update(self._hand_out(due, self._microbatches(arrived)), len(due.microbatches), due.totals)
            training.go_on()
            if training.restarts != restarts:
                raise stale_loop()
            if optimizer.updates == due.step:
                raise incomplete_update(optimizer.updates)
            if optimizer._updated:  # else what it could repeat is not finite
                source.last = self._last_microbatch

    # What the ranks bring. ---------------------------------------------------------------------------------------

    def _read_from(self, items: Iterator[T]) -> None:
        """Make the stream of this rank of the items, behind the rows that a restored state had read."""
        self._items = items
        self._source.read_stream(items, self._restored_rows)
        assert self._source.stream is not None
        self._source.stream.ended |= self._restored_ended
        self._restored_rows, self._restored_ended = None, False

    def _next_arrived(self, items: Iterator[T], rows_of_steps: Iterator[Any]) -> Arrived | None:
        """Return the next batch with rows on any rank, and its update; None if nothing more comes on all ranks."""
        source = self._source
        while True:
            rows = next(rows_of_steps, _NO_MORE)
            ended = rows is _NO_MORE
            rows_here = source.bring_rows(None if ended else rows, ended=ended, can_replay=source.last is not None)
            brought = self._exchange_counts_of_rows(rows_here)
            if all(of_rank.ended for of_rank in brought):
                return None
            if any(of_rank.samples for of_rank in brought):
                return Arrived(items, rows_here, *source.arrange_update(rows_here, brought), brought)
            source.item = None  # nobody had rows

    def _rows_of_steps(self, items: Iterator[T]) -> Iterator[Any]:
        """Yield the rows of this rank in each step, None where it has none, until there are no more.

        Those of a step come again in the next loop if an error came before the ranks had agreed on it.
        """
        source = self._source
        while True:
            item, step = source.item, source.position.step
            if item is None or item.items is not items or item.step != step:
                if (rows := self._next_rows(items)) is _NO_MORE:
                    return
                source.item = item = Item(items, step, rows)
            yield item.batch

    def _next_rows(self, items: Iterator[T]) -> Any:
        """Return the rows of this rank in the next step, None for none; `_NO_MORE` if there will be no more."""
        stream = self._source.stream
        if stream is None:
            return next(items, _NO_MORE)
        too_short = None
        try:
            size = self._source.trace.batch_size(self._optimizer.updates)
        except TraceEndError as error:  # unless the streams have ended, too
            size, too_short = 1, error
        share = self._share_of_step(stream, size)
        if too_short is not None and share is not None:
            raise too_short
        return _NO_MORE if share is None else stream.take_rows(share, self._optimizer.updates)

    def _share_of_step(self, stream: Stream, size: int) -> int | None:
        """Return this rank's share of a step of `size` samples, which its stream then has; None if all have ended."""
        world, updates = self._source.world, self._optimizer.updates
        if self._source.shared:
            stream.read_until(size, updates)
            return min(size, stream.count_available(updates)) or None
        wanted = shares(size, [size] * world.size)
        suffices = False
        while not suffices:  # once, unless a stream ends
            stream.read_until(wanted[world.rank], updates)
            by_rank = self._gather_by_rank(_SHARES, [stream.count_available(updates), stream.ended, size])
            if {said[2] for said in by_rank} != {size}:
                sizes = ", ".join(str(said[2]) for said in by_rank)
                raise value_error(
                    "all ranks must have the same trace", f"sizes {sizes} of an update", "pass one trace on all ranks"
                )
            wanted = shares(size, [available if ended else size for available, ended, _ in by_rank])
            suffices = all(share <= available for share, (available, *_) in zip(wanted, by_rank, strict=True))
        return wanted[world.rank] if any(wanted) else None

    def _gather_by_rank(self, call: str, message: Sequence[Any]) -> list[Any]:
        """Return the message of each rank; if tensor parallelism gives several one rank, they must say the same."""
        world, by_rank = self._source.world, dict[int, Any]()
        for text in self._optimizer.agreement.gather(call, json.dumps([world.rank, message])):
            rank, said = json.loads(text)
            if by_rank.setdefault(rank, said) != said:
                raise RuntimeError(
                    f"ranks that compute parts of the same samples must bring the same rows, but of rank {rank} one "
                    f"has {by_rank[rank][0]} and another {said[0]}; read the same batches on them"
                )
        return [by_rank[rank] for rank in range(world.size)]

    def _exchange_counts_of_rows(self, rows_here: RankRows) -> list[Brought]:
        """Return what each rank has brought, by rank; the first time, warn if two ranks have the same rows."""
        source = self._source
        has_begun = self._source.last is not None
        needs_no_check = source.world.size == 1 or source.shared or not rows_here.brought.rows
        digest = "" if needs_no_check or has_begun else workers.digest(rows_here.batch)
        by_rank = self._gather_by_rank(_CALL, [source.position.step, digest, *rows_here.brought])
        if len(steps := {step for step, *_ in by_rank}) > 1:
            raise RuntimeError(
                f"all ranks must read the same update, but they are at {' and '.join(map(str, sorted(steps)))}, as "
                f"after an error on one of them; restart all ranks from the last checkpoint"
            )
        brought = [Brought(*numbers) for _, _, *numbers in by_rank]
        if source.world.rank == 0:
            workers.warn_of_ranks(dict(enumerate(text for _, text, *_ in by_rank)))
        totals = [of_rank.total for of_rank in brought]
        if self._source.shared and len(set(totals)) > 1:
            raise value_error(
                "with shared=True each rank must be given the whole batch",
                f"{', '.join(map(str, totals))} rows on the ranks",
                "read the same batches on all of them, or omit shared=",
            )
        return brought

    def _complete_arrived(self) -> Arrived:
        """Return the update that is due, with what this rank repeats, and the totals.

        The other ranks wait for each of them, also if an error comes here, after which the loop begins again.
        """
        source, agreement = self._source, self._optimizer.agreement
        arrived = source.arrived
        assert arrived is not None
        if arrived.replay is UNKNOWN:
            source.arrived = arrived = arrived._replace(replay=self._replay_of(arrived))
        if self._counts is not None and arrived.due.totals is None:
            options = {"compares": False, "may_repeat": False}
            microbatches = self._microbatches(arrived)
            totals = self._optimizer._abilities.totals.sum_counts(
                self._counts, microbatches, arrived.due, agreement, **options
            )
            source.arrived = arrived = arrived._replace(due=arrived.due._replace(totals=totals))
        return arrived

    def _replay_of(self, arrived: Arrived) -> Any:
        """Return the microbatch that this rank repeats in an update; another rank sends one to those without."""
        _, rows_here, due, parts, brought, _ = arrived
        source, last = self._source, self._source.last
        all_can = all(of_rank.can_replay for of_rank in brought)
        sends = not all_can and source.world.rank == next(rank for rank, of_rank in enumerate(brought) if of_rank.rows)
        if last is None and parts and (sends or len(due.microbatches) > len(parts)):
            last = source.microbatch(rows_here.batch, parts[0])
        if all_can:
            return last
        text = max(self._optimizer.agreement.gather(_CALL, _as_text(last) if sends else ""), key=len)
        if last is not None:
            return last
        try:
            return _from_text(text, self._optimizer.param_groups[0]["params"][0].device)
        except pickle.UnpicklingError as error:
            raise RuntimeError(
                "a rank without rows in its first update gets a microbatch of another rank, but this one has more "
                "than tensors, numbers and strings in it; bring a row on every rank in the first update"
            ) from error

    def _microbatches(self, arrived: Arrived) -> Iterator[T]:
        """Make the microbatches of an update, replays first."""
        yield from [arrived.replay] * (len(arrived.due.microbatches) - len(arrived.parts))
        for part in arrived.parts:
            yield self._source.microbatch(arrived.rows_here.batch, part)

    def _hand_out(self, due: Batch, microbatches: Iterator[T]) -> Iterator[T]:
        """Yield the microbatches of an update, and count in the source those that were handed out."""
        for number in range(len(due.microbatches)):
            if self._optimizer.updates != due.step:
                raise RuntimeError(
                    f"an update yields its microbatches until it is made, but update {due.step} is read when "
                    f"{self._optimizer.updates} updates are made; read it within its turn of the loop"
                )
            microbatch = next(microbatches)
            self._source.training.handed_out = number + 1
            self._last_microbatch = microbatch
            yield microbatch

    # The state of streams. ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the streams of all ranks: their own, if they have one, and the rows read ahead.

        Every rank has to call it, after the same update.

        Raises:
            RuntimeError: without a trace, or in the middle of a step; or if another rank does not call it.
        """
        if not self._source.has_trace:
            raise RuntimeError(
                "a state needs streams of rows, but these batches are made as they arrive; save the state of what "
                "makes them on this rank, and that of the optimizer"
            )
        self._source.training.check_phase(_STATE, Phase.BETWEEN_STEPS)
        state: dict[str, Any] = {"ended": self._restored_ended, "rows": self._restored_rows}
        stream = self._source.stream
        if stream is not None and stream.items is self._items:
            state = {"ended": stream.ended, "rows": stream.unused_rows(self._optimizer.updates)}
        if callable(state_of := getattr(self._batches, "state_dict", None)):
            state["source"] = state_of()
        else:
            state["rows"] = None  # which come again
        return {"version": 1, "ranks": self._optimizer.agreement.gather(_STATE, _checked_text(state))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the streams were saved, from the next iteration on.

        Raises:
            ValueError: if they were saved on another number of ranks, unless they are shared; or if the state is not
                one of streams.
        """
        if not isinstance(state_dict, dict) or state_dict.get("version") != 1:
            raise value_error("a state of streams must be of version 1", f"{state_dict!r:.60}", "restore one as saved")
        ranks = state_dict["ranks"]
        agreement = self._optimizer.agreement
        if len(ranks) != agreement.world.size and not self._source.shared:
            raise value_error(
                f"streams that each rank reads for itself go on with {len(ranks)} ranks, as they were saved",
                f"{agreement.world.size} ranks",
                "resume on as many, or read one stream on all ranks, with shared=True",
            )
        state = _from_text(ranks[0 if self._source.shared else agreement.world.rank])
        if "source" in state and not state["ended"]:
            self._batches.load_state_dict(state["source"])  # type: ignore[attr-defined]
        self._source.stream = self._source.item = None
        self._restored_rows = state["rows"]
        self._restored_ended = state["ended"] and "source" in state


def check_stream_is_saved(optimizer: CustomOptimizer, parts: Iterable[object]) -> None:
    """Raise RuntimeError if the stream that feeds an optimizer has a state, but is none of the parts that are saved."""
    source = optimizer.sampler
    if not isinstance(source, ArrivingBatches) or not source.streams_have_state:
        return
    if not any(isinstance(part, Arrivals) and part._optimizer is optimizer for part in parts):
        raise RuntimeError(
            "a checkpoint must have the state of the stream, or a run that resumes reads its rows again, but what "
            "vbs.updates() returned is no part of it; pass stream=updates to Checkpoint, with updates = "
            "vbs.updates(loader, optimizer)"
        )


def _copy_compactly(value: Any) -> Any:
    """Return a tree with copies of its tensors, which share no memory with larger ones."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _copy_compactly(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(_copy_compactly, value))
    return value


def _as_text(value: Any) -> str:
    torch.save(_copy_compactly(value), file := io.BytesIO())
    return base64.b64encode(file.getvalue()).decode()


def _checked_text(state: Any) -> str:
    """Return a state as text; raise TypeError if it could not be read again, which executes nothing."""
    text = _as_text(state)
    try:
        _from_text(text)
    except pickle.UnpicklingError as error:
        raise TypeError(
            "the state of a stream, and the rows that were read ahead, must be tensors, numbers and strings in dicts, "
            "lists and tuples, to be saved; yield such rows, not NumPy arrays or named tuples"
        ) from error
    return text


def _from_text(text: str, device: torch.device | None = None) -> Any:
    """Return the value of `_as_text`; tensors of an accelerator come to `device`, by default to the CPU."""
    place: Any = "cpu"
    if device is not None and device.type != "cpu":
        place = {f"{device.type}:{number}": str(device) for number in range(torch.accelerator.device_count())}
    return torch.load(io.BytesIO(base64.b64decode(text)), place, weights_only=True)
