"""The loop over batches that arrive, or over streams of rows; `updates` returns it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, final

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.data.batches import Batch
from variable_batch_size.data.steps import Phase
from variable_batch_size.data.streams.arriving import Agreed, ArrivingBatches, Report
from variable_batch_size.data.streams.shards import as_text, from_text, warn
from variable_batch_size.optim.loops.counts import Count
from variable_batch_size.optim.loops.yielded_update import Update, incomplete_update, stale_loop
from variable_batch_size.optim.optimizer import CustomOptimizer

T = TypeVar("T")

_CALL = "the next update of vbs.updates"
_ROW = "the next update of vbs.updates, in which a rank has no rows"
_STATE = "state_dict() of vbs.updates"


@final
class Arrivals(Generic[T]):
    """The updates of batches that arrive; see `updates`.

    The state of streams, which can be a part of a `Checkpoint`, contains all shards. You can resume it on any number of
    ranks.
    """

    def __init__(
        self,
        batches: Iterable[T] | ArrivingBatches,
        optimizer: CustomOptimizer,
        source: ArrivingBatches,
        counts: Count | None = None,
    ) -> None:
        if source.streams is not None and batches is not source:
            requirement = "where ArrivingBatches has streams=, vbs.updates() reads them"
            raise value_error(requirement, f"a {type(batches).__name__}", "call vbs.updates(source, optimizer)")
        if source.streams is None and not isinstance(batches, Iterable):
            raise type_error("batches must be iterable", batches, "pass this rank's part of each batch, in their order")
        self._batches: Any = batches
        self._optimizer, self._source, self._counts = optimizer, source, counts
        self._last_microbatch: Any = None  # the last one that was yielded to the user's loop

    @property
    def passes(self) -> int:
        """The number of passes over the streams that have ended.

        Raises:
            AttributeError: if there are no streams.
        """
        if self._source.streams is None:
            raise AttributeError("batches that arrive have no passes; pass streams= and trace= to ArrivingBatches")
        return self._source.streams.passes

    def __iter__(self) -> Iterator[Update[T]]:
        """Yield an update for each batch that has rows on any rank; of streams, up to the end of the pass."""
        optimizer, source, training = self._optimizer, self._source, self._source.training
        training.finish_update()
        if optimizer.inside_step:
            raise incomplete_update(optimizer.updates)
        training.note_iteration()
        source.begin(self._batches)
        restarts = training.restarts
        while not training.done:
            # An update that the ranks have agreed on, but whose step was discarded, perhaps on this rank alone, comes
            # again without another exchange.
            if source.agreed is None:
                source.agreed = self._agree()
                if source.agreed is None:
                    return
            agreed = self._complete(source.agreed)
            batch = agreed.batch
            training.expect(batch)
            yield Update(self._hand_out(batch, self._microbatches(agreed)), batch)
            training.finish_update()
            if training.restarts != restarts:
                raise stale_loop()
            if optimizer.updates == batch.step:
                raise incomplete_update(optimizer.updates)
            source.agreed = None
            if optimizer._updated:  # a microbatch of a skipped update may give gradients that are not finite
                source.last = (self._last_microbatch,)

    # The rows that the ranks bring. ----------------------------------------------------------------------------------

    def _agree(self) -> Agreed | None:
        """Read this rank's next rows, exchange their number with all ranks, and return the update made of them.

        The result is None if the batches, or the pass over the streams, have ended on all ranks.
        """
        source, streams = self._source, self._source.streams
        while True:
            rows_read = source.read()  # of this rank, and a report of them for the other ranks
            if rows_read is None:
                source.streams = None if streams is None else streams.next_pass()
                return None
            reports = [Report(*fields) for fields in self._gather_by_rank(rows_read.report)]
            self._check(reports)
            shards = [shard for report in reports for shard in report.shards]
            if streams is not None and not streams.suffices(rows_read.given, shards):
                continue  # a shard has ended: read again, because the other ones have to give more rows
            if any(report.samples for report in reports):
                if streams is not None and not rows_read.report.size:
                    source.trace.batch_size(rows_read.report.step)  # the trace has ended: raises on all ranks
                return source.arrange(rows_read, reports)
            if not any(available for _, available, *_ in shards):  # no shard has a next batch or row
                return None
            source.pass_over()  # no rank has rows in this batch, but more batches follow

    def _gather_by_rank(self, message: Sequence[Any]) -> list[Any]:
        """Exchange a message, any JSON value, with all ranks, and return the messages by rank. Every rank calls it.

        With tensor parallelism several processes have one rank, and must send equal messages.
        """
        world, by_rank = self._source.world, dict[int, Any]()
        for text in self._optimizer.agreement.gather(_CALL, json.dumps([world.rank, message])):
            rank, received = json.loads(text)
            if by_rank.setdefault(rank, received) != received:
                raise RuntimeError(
                    f"ranks that compute parts of the same samples must bring the same rows, but of rank {rank} one "
                    f"brings {by_rank[rank]} and another {received}; read the same batches on them"
                )
        return [by_rank[rank] for rank in range(world.size)]

    def _check(self, reports: Sequence[Report]) -> None:
        """Raise an error on every rank if ranks read other updates, traces or items. Warn if two read the same rows.

        The reports have digests of rows, by which that is seen, before the first update only.
        """
        source = self._source
        steps = {report.step for report in reports}  # the number of the update that each rank reads
        if len(steps) > 1:
            raise RuntimeError(
                f"all ranks must read the same update, but they are at {' and '.join(map(str, sorted(steps)))}, as "
                f"after an error on one of them; restart all ranks from the last checkpoint"
            )
        _check_equal("have the same trace", "batch sizes", [report.size for report in reports], "pass one trace")
        keys = [[key for *_, key in report.shards] for report in reports]
        if source.streams is None:
            keys = [keys_of_rank for keys_of_rank in keys if keys_of_rank != [None]]  # without ranks without rows
        if source.whole or source.streams is None:
            _check_equal("read the same items", "keys", keys, "let all ranks read them in one order")
        if source.whole:
            remedy = "read the same on all of them" + (", or omit shared=" if source.streams is None else "")
            _check_equal("be given the same rows", "numbers of rows", [report.total for report in reports], remedy)
            digests = [report.digest for report in reports if report.digest]
            _check_equal("be given the same rows", "other rows, digests", digests, remedy)
            return
        digests = [report.digest for report in reports]
        for rank, text in enumerate(digests):
            first = digests.index(text)
            if text and first < rank and source.world.rank == 0:
                warn(
                    f"Ranks {first} and {rank} begin with the same rows, so that each row is used once by both; let "
                    f"each read its own part, by rank and num_replicas of the ArrivingBatches, or pass shared=True"
                )

    def _complete(self, agreed: Agreed) -> Agreed:
        """Return the update, on which the ranks have agreed, with rows to repeat and with totals of counts.

        A rank with fewer microbatches than others repeats one with weight 0, so that all communicate equally often.
        Each result is stored in `source.agreed` at once, so that a loop that is restarted after an error on this rank
        does not wait for the others once more.
        """
        source, agreement = self._source, self._optimizer.agreement
        if agreed.replay is None:
            source.agreed = agreed = agreed._replace(replay=self._find_replay(agreed))
        if self._counts is not None and agreed.batch.totals is None:
            options = {"compares": False, "may_repeat": False}
            summing, microbatches = self._optimizer._abilities.totals, self._microbatches(agreed)
            totals = summing.sum_counts(self._counts, microbatches, agreed.batch, agreement, **options)
            source.agreed = agreed = agreed._replace(batch=agreed.batch._replace(totals=totals))
        return agreed

    def _find_replay(self, agreed: Agreed) -> tuple[Any, ...]:
        """Return the microbatch that this rank computes again with weight 0, in a tuple, which is empty without one.

        It is the last one of the update before, or the first one of this update. If a rank has neither, the first rank
        that has rows sends one row to all ranks.
        """
        source, layout, texts = self._source, self._source.layout, [""]
        item, batch, parts, reports, _ = agreed  # `parts`: the rows of each microbatch of this rank, in `item`
        if not all(report.can_repeat for report in reports):  # a rank has neither of the two: all of them exchange
            is_sender = source.world.rank == next(rank for rank, report in enumerate(reports) if report.rows)
            # A function, because an error in it is then raised on all ranks. `str` returns "" on other ranks.
            first_row_as_text = (lambda: as_text(layout.select(item, parts[0][:1]))) if is_sender else str
            texts = self._optimizer.agreement.run_on_all(_ROW, first_row_as_text)
        if len(parts) == len(batch.microbatches):  # all microbatches have rows of this rank
            return ()
        if source.last is not None:  # the last microbatch of the update before
            return (source.last[0],)
        if parts:
            return (layout.microbatch(item, parts[0]),)
        device = self._optimizer.param_groups[0]["params"][0].device
        return (layout.microbatch(from_text(max(texts, key=len), device)),)  # the longest text: others send ""

    def _microbatches(self, agreed: Agreed) -> Iterator[Any]:
        """Yield this rank's microbatches of an update, first those that it only repeats, with weight 0."""
        num_repeated = len(agreed.batch.microbatches) - len(agreed.parts)  # all ranks compute equally many
        yield from (agreed.replay or ()) * num_repeated  # `replay` has one microbatch, or none
        for part in agreed.parts:
            yield self._source.layout.microbatch(agreed.item, part)

    def _hand_out(self, batch: Batch, microbatches: Iterator[Any]) -> Iterator[Any]:
        """Yield the microbatches of an update to the user's loop, and note which one `step()` must count next.

        `batch`: the update. `microbatches`: this rank's.
        """
        for number in range(len(batch.microbatches)):
            if self._optimizer.updates != batch.step:  # it was made already, or is read before its turn
                raise RuntimeError(
                    f"an update yields its microbatches until it is made, but update {batch.step} is read when "
                    f"{self._optimizer.updates} updates are made; read it within its turn of the loop"
                )
            microbatch = next(microbatches)
            self._source.training.expect(batch, number + 1)
            self._last_microbatch = microbatch
            yield microbatch

    # The state of streams. -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all shards: where each is, and the rows that were read ahead.

        Every rank has to call it, after the same update.

        Raises:
            RuntimeError: without streams, or in the middle of a step; on every rank if the state of a shard does not
                move with its rows, or cannot be saved; or if another rank does not call it.
        """
        streams, training = self._source.streams, self._source.training
        if streams is None:
            raise RuntimeError(
                "a state needs streams of rows, but these batches are made as they arrive; save the state of the "
                "optimizer, and of what makes them on this rank"
            )
        training.check_phase(_STATE, Phase.BETWEEN_STEPS)
        update = self._optimizer.updates  # the number of updates so far
        texts = self._optimizer.agreement.run_on_all(_STATE, lambda: json.dumps([*streams.states(update).items()]))
        # Each text is a list of pairs: the number of a shard, and its state.
        return streams.state_dict({number: state for text in texts for number, state in json.loads(text)})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the streams were saved, from the next iteration on, on any number of ranks.

        Raises:
            ValueError: if the state is not one of as many streams.
            RuntimeError: without streams.
        """
        if self._source.streams is None:
            raise RuntimeError("a state is one of streams, but these batches are made as they arrive; pass streams=")
        self._source.streams, self._source.agreed = self._source.streams.next_pass(state_dict), None


def _check_equal(requirement: str, what: str, by_rank: Sequence[Any], remedy: str) -> None:
    """Raise ValueError, on every rank, unless the values of all ranks are equal; `what`: names them in the error."""
    if any(value != by_rank[0] for value in by_rank):
        raise value_error(f"all ranks must {requirement}", f"{what} {', '.join(map(str, by_rank))}", remedy)


def check_stream_is_saved(optimizer: CustomOptimizer, parts: Iterable[object]) -> None:
    """Raise RuntimeError if streams feed an optimizer, but their state is not among the parts of a checkpoint."""
    source = optimizer.sampler
    if not isinstance(source, ArrivingBatches) or source.streams is None:
        return
    if not any(isinstance(part, Arrivals) and part._optimizer is optimizer for part in parts):
        raise RuntimeError(
            "a run that resumes needs the state of the streams, or reads their rows again, but the checkpoint has "
            "none; pass stream=updates to Checkpoint, with updates = vbs.updates(source, optimizer)"
        )
