"""How items of iterators are read, and shards of streams, whose rows are the same for any number of ranks.

"Used" rows are those of updates that were made. What a shard has read beyond them is "left" for the next update.
"""

from __future__ import annotations

import base64
import io
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import IntArray, value_error
from variable_batch_size.data.streams.arrival import shares
from variable_batch_size.data.streams.rows import Layout, digest
from variable_batch_size.world import World

_VERSION = 2  # 1: one stream on each rank
_BEGIN: dict[str, Any] = {"ended": False, "used": 0}  # the state of a shard that is not read yet


@final
class _Read(NamedTuple):
    """What was read of a shard, as one value: an interrupt leaves the old value or the new one, and no mixture."""

    items: list[Any]  # items that were read, without those whose rows are all used
    counts: list[IntArray]  # what each row of an item counts, (rows,) each; the last items may not be counted yet
    before: int  # number of rows before those of `items`
    update: int  # the update for which rows were taken last
    first: int  # the first row that was taken for it, among the rows of `items`
    end: int  # the row after the last one that was taken for it


@final
class Shard:
    """The rows of an iterator that were read, and how many of them are used.

    Nobody reports that an update is made: rows that were taken for an update are used once a later update asks.

    Args:
        items: an iterator over items, of any number of rows.
        layout: how these have rows.
        source: the iterable of which the iterator was made.
        by_item: whether an item is counted and taken as a whole, as one row.
        kept: an item with rows that come before those of `items`, from a restored state.
        used: number of rows that are used, before `kept` and `items`.
        skipped: number of rows that are used, the first ones of `items`.

    Attributes:
        ended: whether the iterator has ended.
        asked: how many items the iterator was asked for.
        key: the name of the item that was read last, see `Layout.key_of`.
    """

    def __init__(
        self,
        items: Iterator[Any],
        layout: Layout,
        source: object,
        *,
        by_item: bool = False,
        kept: Any = None,
        used: int = 0,
        skipped: int = 0,
    ) -> None:
        """Begin with no item read, but for the one with rows that a restored state holds."""
        self.items, self._layout, self._by_item = items, layout, by_item
        self.ended, self.asked = False, 0
        self._failed = False  # whether the last read has raised
        self.key: str | int | None = None
        restored_items = [] if kept is None else [kept]
        self._read = _Read(restored_items, [], before=used, update=-1, first=skipped, end=skipped)
        self._compares = isinstance(source, DataLoader) and source.num_workers > 1  # until two items were compared
        self._digest = ""  # of the first item, if several workers read items

    def read_until(self, size: int, update: int) -> int:
        """Read items of the iterator until the rows for an update count at least `size`, or it has ended.

        Args:
            size: what the rows are to count, in samples or tokens.
            update: number of the update; rows that were taken for an earlier one are used.

        Returns:
            What the rows that are left for the update count: less than `size` if the iterator has ended.

        Raises:
            RuntimeError: if the iterator has raised before, and has ended instead of going on.
        """
        available = int(self.left(update).sum())
        while available < size and not self.ended:
            items, counts = self._read.items, self._read.counts
            try:
                # One call reads and stores: between next() and append() an interrupt would lose the item.
                items.extend(islice(self.items, 1))
            except Exception:
                self._failed = True
                raise
            self.asked += 1
            found_end = len(items) == len(counts)  # nothing was added
            self._failed = self._failed and found_end
            if self._failed:
                raise RuntimeError(
                    "a stream must continue after an exception, but it ended at once, as a generator does after an "
                    "exception; load the state of the last checkpoint, or loop over a new iterator"
                )
            self.ended = found_end
            added = 0 if self.ended else int(self._count_next().sum())
            # The first rows of the first items may be used, after a restore; then only `left` knows what counts.
            available = available + added if available else int(self.left(update).sum())
        return available

    def left(self, update: int) -> IntArray:
        """Return the counts of the rows that are left for an update, (rows,); forget the rows of earlier updates.

        A later update than the one for which rows were taken last shows that this one was made: its rows are used.
        """
        while len(self._read.counts) < len(self._read.items):
            self._count_next()
        items, counts, rows_before, taken_for, first, end = self._read
        begin = end if taken_for < update else first  # the first row that is left, among the rows of `items`
        end = end if taken_for == update else begin  # those that were taken for this update stay taken
        while counts and len(counts[0]) <= begin:  # all rows of the first item are used: drop it
            dropped = len(counts[0])
            rows_before, begin, end = rows_before + dropped, begin - dropped, end - dropped
            items, counts = items[1:], counts[1:]
        self._read = _Read(items, counts, rows_before, update, begin, end)
        return np.concatenate([np.zeros(0, np.int64), *counts])[begin:]

    def take(self, size: int, update: int) -> list[Any]:
        """Take rows for an update, as few as count at least `size`, in their order; return them as items.

        Another call for the same update takes the same rows again.
        """
        counts = self.left(update)
        num_rows = 0
        if size > 0:  # with the row at which the sum of counts reaches `size`
            num_rows = min(len(counts), int(np.searchsorted(np.cumsum(counts), size)) + 1)
        self._read = self._read._replace(end=self._read.first + num_rows)
        return self._first_left(num_rows)

    def drop(self) -> None:
        """Leave out the items that were taken last: no rank has rows in them, so that there is no update to make."""
        self._read = self._read._replace(update=-1)  # as if they were for an earlier update than any, and so used

    def unused(self, update: int) -> list[Any]:
        """Return the rows that were read and are left for an update, as items: a checkpoint saves them."""
        return self._first_left(len(self.left(update)))

    def used(self, update: int) -> int:
        """Return how many rows of the shard are used by the updates before `update`."""
        self.left(update)
        return self._read.before + self._read.first

    def _count_next(self) -> IntArray:
        """Return, and store, what each row counts of the first item that was read and not counted yet, (rows,).

        Warn if it is the second item of a loader with several workers, and equal to the first one.
        """
        item = self._read.items[len(self._read.counts)]
        counts = np.ones(1, np.int64) if self._by_item else self._layout.counts_of(item)
        self.key = self._layout.key_of(item)
        if self._compares:  # at the first two items, of which each is the first one of a worker
            first_digest, self._digest = self._digest, digest(item)
            self._compares = not first_digest
            if first_digest and first_digest == self._digest:
                warn(
                    "The workers of the loader begin with the same rows, so that each row is used once by every "
                    "worker; let each read its own part of the stream, by torch.utils.data.get_worker_info()"
                )
        self._read.counts.append(counts)
        return counts

    def _first_left(self, number: int) -> list[Any]:
        """Return the first `number` rows that are left, as items; the first and the last item may be cut."""
        items = []
        begin = -self._read.first  # number of an item's first row, among the rows that are left; negative if it is used
        for item, counts in zip(self._read.items, self._read.counts, strict=True):
            first_row, end_row = max(0, -begin), min(len(counts), number - begin)
            if first_row < end_row:
                is_whole = end_row - first_row == len(counts)
                items.append(item if is_whole else self._layout.select(item, np.arange(first_row, end_row)))
            begin += len(counts)
        return items


@final
class Streams:
    """A pass over the shards: each rank reads its own ones, or all if there are fewer shards than ranks.

    Args:
        sources: the shards, the same on all ranks.
        world: this rank, and the number of ranks.
        layout: how their items have rows.
        passes: number of passes that have ended.
        restored: the states with which shards begin, by number.
        spent: numbers of shards of which this process has read rows in another pass, or before a restore.

    Attributes:
        passes: as the argument.
        whole: whether each rank reads all shards.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        world: World,
        layout: Layout,
        passes: int = 0,
        restored: Mapping[int, dict[str, Any]] | None = None,
        spent: Iterable[int] = (),
    ) -> None:
        """Choose the shards that this rank reads; each is opened when its first row is needed."""
        self._sources, self._world, self._layout, self.passes = list(sources), world, layout, passes
        self.whole = len(self._sources) < world.size
        # The numbers of the shards that this rank reads.
        self._own = range(len(self._sources)) if self.whole else range(world.rank, len(self._sources), world.size)
        self._restored, self._spent = restored or {}, {*spent}
        self._shards: dict[int, Shard] = {}  # those that were opened
        self._left: dict[int, int] = {}  # what is left at most of each shard whose end all ranks know
        self._saved: dict[int, tuple[str, int]] = {}  # digest of a source's last state, and `Shard.asked` at that time

    def shares(self, size: int) -> list[int]:
        """Return what each shard, a stream of rows, is to give to an update, (shards,); zeros if all shards have ended.

        It is computed from what all ranks know, so that all get the same: a shard whose end is not known yet can give
        any number.

        Args:
            size: what the rows of the update are to count, over all shards.
        """
        return shares(size, [self._left.get(shard, size) for shard in range(len(self._sources))])

    def read(self, given: Sequence[int], update: int) -> tuple[list[Any], list[list[Any]]]:
        """Read and take what the shards of this rank give to an update.

        Args:
            given: what each shard is to give.
            update: number of the update.

        Returns:
            The rows, as items; and a report for each shard that is read, which all ranks then exchange: its number,
            what its rows that are left count, whether it has ended, and the key of its last item.
        """
        items, reports = list[Any](), []
        for number in self._own:
            if number not in self._shards:
                self._shards[number] = self._open(number)
            shard = self._shards[number]
            reports.append([number, shard.read_until(given[number], update), shard.ended, shard.key])
            items += shard.take(given[number], update)
        return items, reports

    def suffices(self, given: Sequence[int], reports: Sequence[Sequence[Any]]) -> bool:
        """Return whether all shards have what they are to give to an update, by the reports of all ranks.

        If not, the ranks compute shares again, with what is left of the shards that have ended, which this call
        remembers.

        Args:
            given: what each shard is to give, (shards,).
            reports: what `read` has returned of each shard, on all ranks.
        """
        self._left.update({number: available for number, available, ended, _ in reports if ended})
        return all(available >= given[number] for number, available, *_ in reports)

    def next_pass(self, state: Any = None) -> Streams:
        """Return the next pass over the shards, or the one in which a state was saved, in any world.

        Args:
            state: what `state_dict` returned; None for the next pass.

        Raises:
            ValueError: if the state is not one of as many shards.
        """
        passes, restored = self.passes + 1, {}
        spent = self._spent | {number for number, shard in self._shards.items() if shard.asked}
        if state is not None:
            if not isinstance(state, dict) or state.get("version") != _VERSION:
                remedy = "restore one as saved; resume an earlier one with the version that saved it"
                raise value_error(f"a state of streams must be of version {_VERSION}", f"{state!r:.60}", remedy)
            if len(state["shards"]) != len(self._sources):
                requirement = f"streams must be as many as were saved, {len(state['shards'])}"
                raise value_error(requirement, len(self._sources), "pass the same streams=, on any number of ranks")
            passes, restored = state["passes"], {number: from_text(state["shards"][number]) for number in self._own}
        return Streams(self._sources, self._world, self._layout, passes, restored, spent)

    def _open(self, number: int) -> Shard:
        """Begin to read a shard, at its beginning or where it was saved.

        Raises:
            RuntimeError: if it is an iterator that was read, and so cannot begin anew.
        """
        source, state = self._sources[number], self._restored.get(number, _BEGIN)
        for owner in (source, getattr(source, "dataset", None)):  # so that each pass is shuffled in another way
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.passes)
        resumes = "own" in state and hasattr(source, "load_state_dict")
        if resumes:
            source.load_state_dict(state["own"])
            self._saved[number] = _digest_of_place(source, state["own"]), 0
        items = iter(()) if state["ended"] else iter(source)
        if items is source and number in self._spent and not resumes:  # iter() does not begin it again
            raise RuntimeError(
                f"shard {number}, a {type(source).__name__}, is its own iterator and was read, but a stream must "
                "restart in each pass and state; pass an iterable whose __iter__() restarts it, or one with "
                "load_state_dict()"
            )
        if resumes or state["ended"]:
            return Shard(items, self._layout, source, kept=state.get("rows"), used=state["used"])
        return Shard(items, self._layout, source, skipped=state["used"])

    def states(self, update: int) -> dict[int, str]:
        """Return the state of each shard that this rank has to save, as text.

        Raises:
            RuntimeError: if the state of a source does not change, although more was read than between two snapshots.
            TypeError: if a state or rows have a type that could not be loaded again.
        """
        numbers = self._own if not self.whole or self._world.rank == 0 else []  # if all ranks read all, rank 0 saves
        return {number: as_text(self._state_of(number, update)) for number in numbers}

    def _state_of(self, number: int, update: int) -> dict[str, Any]:
        """Return the state of a shard before an update, from which another run continues to read it.

        Its entries are "ended": whether the shard has; "used": number of rows of earlier updates; "own": the state of
        the source, if that has one; and "rows": the rows that were read and are left, beside "own" or at the end.
        Without "own" a restored shard reads anew, and skips the rows that are used.
        """
        restored, source = self._restored.get(number, _BEGIN), self._sources[number]
        shard = self._shards.get(number)
        if shard is None:
            return restored
        unused = shard.unused(update)
        state: dict[str, Any] = {"ended": shard.ended, "used": shard.used(update)}
        if not shard.asked and "own" in restored:  # before its first item an iterator may report another state
            state["own"] = restored["own"]
        elif shard.asked and not shard.ended and callable(getattr(source, "state_dict", None)):
            state["own"] = source.state_dict()
            self._check_moves(number, shard, state["own"])
        if unused and ("own" in state or shard.ended):
            state["rows"] = self._layout.join(unused)
        return state

    def _check_moves(self, number: int, shard: Shard, own: Any) -> None:
        """Raise RuntimeError if the state of a source has not changed since it was last saved, although it should.

        Only warn if the source does not say how many items lie between two of its snapshots.

        Args:
            number: number of the shard.
            shard: the shard.
            own: the state that the source has returned now.
        """
        source = self._sources[number]
        digest_now, (saved_digest, asked) = _digest_of_place(source, own), self._saved.get(number, ("", 0))
        interval = getattr(source, "snapshot_every_n_steps", None)  # as a StatefulDataLoader has it
        if digest_now != saved_digest or not digest_now:  # it has changed, or cannot be compared
            self._saved[number] = digest_now, shard.asked
        elif shard.asked - asked > (interval or 1):
            sentence = (
                f"the state of a stream must move with its rows, but {shard.asked - asked} items of shard {number}, a "
                f"{type(source).__name__}, were read and its state_dict() is as before, so that a run which "
                f"resumes reads them again; return where it is, or leave out state_dict(): used rows are skipped then"
            )
            if interval is not None:
                raise RuntimeError(sentence)
            warn(sentence[0].upper() + sentence[1:])

    def state_dict(self, texts: Mapping[int, str]) -> dict[str, Any]:
        """Return the state of the pass; `texts`: the states of all shards, as `states` of all ranks returns them."""
        return {"version": _VERSION, "passes": self.passes, "shards": [text for _, text in sorted(texts.items())]}


def _digest_of_place(source: Any, own: Any) -> str:
    """Return a hash of the state of a source, which changes only if the source has moved.

    The state of a StatefulDataLoader also counts what the loader yields; only the states of its dataset, if there are
    any, tell whether the dataset moves.

    Args:
        source: the iterable of a stream.
        own: what its `state_dict()` has returned.
    """

    def states_of_dataset(state: Any) -> list[Any]:
        """Return the states of the dataset that are nested in the state of a loader, as those of its workers."""
        states = []
        for name, value in state.items() if isinstance(state, Mapping) else ():
            if name in ("dataset_state", "dataset_iter_state") and value is not None:
                states.append(value)
            else:
                states += states_of_dataset(value)
        return states

    is_loader = isinstance(getattr(source, "dataset", None), IterableDataset)
    return digest((states_of_dataset(own) if is_loader else []) or own)


def warn(sentence: str) -> None:
    """Warn with the line of the user's code that has called the library."""
    warnings.warn(sentence, UserWarning, stacklevel=stacklevel_of_user())


def as_text(value: Any) -> str:
    """Return rows or a state as text, for a checkpoint or another rank.

    Raises:
        TypeError: if `from_text`, which executes no code, could not load it.
    """
    compact = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)  # shares no memory with larger ones
    file = io.BytesIO()
    torch.save(compact, file)
    text = base64.b64encode(file.getvalue()).decode()
    try:
        from_text(text)
    except pickle.UnpicklingError as error:
        raise TypeError(
            "the state of a stream, and rows that are read ahead or sent, must be tensors, numbers and strings in "
            "dicts, lists and tuples; yield such rows, not NumPy arrays or named tuples"
        ) from error
    return text


def from_text(text: str, device: torch.device | None = None) -> Any:
    """Return the value that `as_text` has made a text; tensors of an accelerator come to `device`, or to the CPU."""
    map_location: Any = "cpu"
    if device is not None and device.type != "cpu":  # from any accelerator of the rank that has sent the text
        map_location = {f"{device.type}:{number}": str(device) for number in range(torch.accelerator.device_count())}
    return torch.load(io.BytesIO(base64.b64decode(text)), map_location, weights_only=True)
