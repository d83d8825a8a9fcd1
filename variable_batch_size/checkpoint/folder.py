"""A folder of checkpoints, on a disk or in an object store: which there are, which one is the best, which are deleted.

A checkpoint is a folder `update-00000812-0003-1-2`: of update 812, the first save of the writer 3, by 2 ranks. It
exists when the JSON of all these ranks is there: no rank waits for another one to publish it. That of rank 0 is deleted
first. The newest checkpoint is the last save of the last writer that has saved: what an earlier writer adds, which
wakes up after another one took over, is never newer, and no writer deletes what a later one has written. Users keep
other files in the same folder: only files of these names are deleted.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, final

from torch import Tensor

from variable_batch_size.checkpoint import tensor_file
from variable_batch_size.checkpoint.best import Criterion
from variable_batch_size.checkpoint.contents import (
    FORMAT,
    MANIFEST,
    VERSION,
    DamagedError,
    VersionError,
    parse_manifest,
    verify,
    write_manifest,
)
from variable_batch_size.checkpoint.shards import Part
from variable_batch_size.checkpoint.storage import DAMAGE, Storage
from variable_batch_size.checkpoint.writer import Writer

_NAME = re.compile(r"update-(\d{8,})-(\d{4,})-(\d+)-(\d+)")
_FILE = re.compile(r"rank-\d+\.json(\.new)?|tensors-\d+\.safetensors")


@final
class Folder:
    """The checkpoints in one folder, which has at most one writer.

    Args:
        location: a path, or a URL of fsspec.
        run: see `Writer`.

    Attributes:
        id: random text that all ranks of the writing training have; "" if this object does not write.
        goes_on: whether the training in memory had saved or restored in this folder before this object was created.
        current: name of the checkpoint that this process has restored or saved last, on the writer; "" before that.
        restored_best: whether `current` was restored as the best one, and nothing was saved since then.
        left: on the writer, names of the checkpoints that were newer than a best one that was restored; the next save
            deletes them.
    """

    def __init__(self, location: str | os.PathLike[str], run: str | None = None) -> None:
        """Open the folder for reading; it is written to only after `lock`."""
        self.storage = Storage(location)
        self.writer = Writer(self.storage, run)
        self.id, self.goes_on = "", False
        self.current, self.restored_best, self.left = "", False, list[str]()
        self._saves = 0
        self._earlier = list[str]()  # names of the checkpoints that existed when this process became the writer
        self._intact = set[str]()  # names of the checkpoints that were found intact, and are not read again to find out
        self._reported = dict[str, dict[str, Any]]()  # cache of `reported`, on the writer, which alone changes a JSON

    # Which checkpoints there are. -------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of the checkpoints, the newest first; they are not verified."""
        return self._list_all()[0]

    def _list_all(self) -> tuple[list[str], dict[str, set[str]]]:
        """Return the names of complete checkpoints, the newest first; and other names in the folder, with files.

        A checkpoint is complete if it has the JSON of each rank that writes, as many as its name says.
        """
        listed = self.storage.listed("update-")
        complete = list[str]()
        for name, files in listed.items():
            match = _NAME.fullmatch(name)
            ranks = int(match[4]) if match else 0
            # The number is compared first: a name may claim more ranks than a set of names has room for.
            if match and ranks <= len(files) and files >= {f"rank-{rank}.json" for rank in range(ranks)}:
                complete.append(name)
        return sorted(complete, key=_order, reverse=True), {name: listed[name] for name in listed.keys() - complete}

    def candidates(self, *, best: bool, criterion: Criterion | None = None) -> list[str]:
        """Return the names of the checkpoints in the order in which a restore tries them.

        Args:
            best: whether the best one comes first, see `best_first`; otherwise the newest one does.
            criterion: what makes a checkpoint better, for `best`.

        Raises:
            VersionError: if there are only checkpoints whose names are of another version.
        """
        names, folders = self._list_all()
        unknown = [
            name for name in folders if name.startswith("update-") and any(folders[name]) and not _NAME.fullmatch(name)
        ]
        if not names and unknown:
            raise VersionError(
                f"Checkpoint {self.storage.at(max(unknown))} must have version {VERSION} of the format {FORMAT}, got "
                f"the name of another version; continue with the release that saved it, or choose another folder"
            )
        return self.best_first(criterion) if best else names

    def incomplete(self) -> list[str]:
        """Return the names of folders, newest first, that are no checkpoints because the JSON of a rank is missing.

        A rank is still writing there, or was killed while it wrote.
        """
        return sorted(filter(_NAME.fullmatch, self._list_all()[1]), key=_order, reverse=True)

    def lost(self, *, best: bool = False) -> dict[str, str]:
        """Return the checkpoints that were saved but are gone: name -> what is missing.

        The writer keeps a record of the newest and of the best checkpoints that it has saved. Without this record, a
        deleted checkpoint would not be noticed, and `restore()` would silently use an older one.

        Args:
            best: whether to compare the record of the best checkpoints, instead of the record of the newest one.
        """
        newest, bests = self.writer.last_saved()  # read before the list, which then has it or a newer one
        names, folders = self._list_all()  # complete checkpoints, the newest first; and all folders
        if best:
            lost = [name for name in bests if name not in names]
            if lost:  # read the record again: the run may have found a better checkpoint and deleted these
                lost = [name for name in self.writer.last_saved()[1] if name in lost]
        else:
            lost = []
            if _NAME.fullmatch(newest):  # empty in a folder of an earlier version, or without a save
                has_one_as_new = bool(names) and _order(names[0]) >= _order(newest)
                lost = [] if has_one_as_new else [newest]
        return {name: "the JSON of a rank is missing" if name in folders else "its folder is missing" for name in lost}

    def newest(self) -> str | None:
        """Return the newest intact checkpoint, or None."""
        return self._first_intact(self.names)

    def _first_intact(self, listed: Callable[[], list[str]]) -> str | None:
        """Return the name of the first intact checkpoint that the function `listed` returns, or None.

        It calls `listed` again after each damaged one: a training may have saved meanwhile, and deleted what was
        listed.
        """
        tried = set[str]()
        while names := [name for name in listed() if name not in tried]:
            if self.is_intact(names[0]):
                return names[0]
            tried.add(names[0])
        return None

    def best_first(self, criterion: Criterion | None = None) -> list[str]:
        """Return the checkpoints with a reported value, the best first; the oldest one first if values are equal.

        Those with a damaged JSON precede them, because any of them may be the best.

        Args:
            criterion: what makes a checkpoint better. Default: as the newest checkpoint with a criterion has it.
        """
        reported = [(name, self.reported(name)) for name in self.names()]
        if criterion is None:
            criteria = (Criterion.of_manifest(facts or {}) for _, facts in reported)
            criterion = next(filter(None, criteria), None)
        if criterion is None:
            return [name for name, facts in reported if facts is None]
        return _best_first(criterion, reported)

    def best(self, criterion: Criterion | None = None) -> str | None:
        """Return the first intact checkpoint of `best_first`, or None."""
        return self._first_intact(partial(self.best_first, criterion))

    def is_better(self, facts: Mapping[str, Any], criterion: Criterion) -> bool:
        """Return whether reported values are better than the values of every intact checkpoint in the folder.

        Args:
            facts: the reported values, as the JSON of a checkpoint has them.
            criterion: the metric that counts, and whether low or high values of it are better.
        """
        best = self.best(criterion)
        score_to_beat = criterion.score(self.reported(best) or {}) if best else math.inf  # the lower, the better
        return criterion.score(facts) < score_to_beat

    def reported(self, name: str) -> dict[str, Any] | None:
        """Return the criterion and the metrics in the JSON of a checkpoint; None if the JSON is damaged."""
        if name in self._reported:
            return self._reported[name]
        try:
            manifest = parse_manifest(self.storage.read(name, MANIFEST).decode())
        except VersionError as error:
            raise VersionError(f"Checkpoint {self.storage.at(name)} cannot be read: {error}") from None
        except DAMAGE as error:
            if not self.storage.is_damage(error):
                raise
            return None
        facts = {key: value for key, value in manifest.items() if key in ("best", "metrics")}
        if self.writer.number:
            self._reported[name] = facts
        return facts

    def is_intact(self, name: str) -> bool:
        """Return whether all bytes of a checkpoint are as they were written; an intact one is read only once."""
        return self._check_intact(name) is True

    def _check_intact(self, name: str) -> bool | None:
        """Return whether a checkpoint is intact; None if the disk, or too little memory, prevents reading it now."""
        if name not in self._intact:
            try:
                verify(self.storage, name)
            except DamagedError as error:
                return None if error.temporary else False
            except MemoryError:
                return None
            self._intact.add(name)
        return True

    # What the writer does. --------------------------------------------------------------------------------------------

    def lock(self) -> str:
        """Create the folder, lock it for this run, and return a token by which other ranks recognize the folder.

        Raises:
            OSError: if the folder cannot be created or is itself a checkpoint, or another process writes there.
        """
        try:
            self.storage.make()
            if MANIFEST in (names := self.storage.names()):
                raise OSError(
                    f"dir must be the folder of a run, got the checkpoint {self.storage.location}; pass the "
                    "folder that it is in"
                )
            self.writer.acquire(max((_order(name)[0] for name in filter(_NAME.fullmatch, names)), default=0))
            try:
                self._earlier = self.names()
            except BaseException:
                self.writer.release()
                raise
        except OSError as error:
            if error.errno is None:  # the error names another writer, and is not the operating system's
                raise
            raise OSError(
                f"dir must be a writable folder, got {self.storage.location} ({error.strerror or error}); choose "
                "another folder"
            ) from error
        self.id = self.writer.token
        return self.id

    def is_shared(self, token: str) -> bool:
        """Return whether this process can write to the folder whose writer has this token.

        It may see another folder of this name, as on a disk of its own.
        """
        writable = not self.storage.on_disk or os.access(self.storage.location, os.W_OK)
        return writable and self.writer.is_known(token)

    def mark_restored(self, name: str, *, best: bool) -> None:
        """Record that the training has restored an intact checkpoint, and continues from it.

        After the best one was restored, the newer ones are of a course of the training that was left.
        """
        self._intact.add(name)
        names = self.names() if best and self.writer.number else []
        self.left = names[: names.index(name)] if name in names else []  # the newer ones, deleted by the next save
        self.current, self.restored_best, self._earlier = name, best, []

    def begin(self, update: int, ranks: int) -> str:
        """Return the name of the next checkpoint, and delete incomplete ones, which ranks that were killed have left.

        Args:
            update: number of updates that were made.
            ranks: number of ranks that write.

        Raises:
            ValueError: if the folder had a checkpoint that the training has neither saved nor restored.
            RuntimeError: if this process is not the writer.
        """
        self.writer.check()
        names, other_folders = self._list_all()
        # `_earlier` is empty after a restore: then the training continues what is in the folder.
        not_ours = [name for name in self._earlier if name in names and (not self.goes_on or update_of(name) > update)]
        if foreign := next(filter(self.is_intact, not_ours), None):
            raise ValueError(
                f"Checkpoint {self.storage.at(foreign)} is not one of this run, which has made {update} updates, "
                f"and saves would delete it; restore() it first; another folder begins a different run"
            )
        for name in filter(_NAME.fullmatch, other_folders):
            self.discard(name)
        self._saves += 1
        return f"update-{update:08d}-{self.writer.number:04d}-{self._saves}-{ranks}"

    def write(
        self, name: str, rank: int, tensors: Mapping[str, Tensor], parts: Mapping[str, Part], facts: Mapping[str, Any]
    ) -> None:
        """Write the files of one rank; the checkpoint exists when all ranks that write have written theirs.

        Args:
            name: name of the checkpoint.
            rank: number of this rank among those that write.
            tensors: what it writes, by name, in host memory.
            parts: the part of the whole tensor that each of them is.
            facts: entries of its JSON.

        Raises:
            OSError: if it cannot be written.
            RuntimeError: on rank 0, if another process has become the writer; if another training has these files.
        """
        file = None
        try:
            # No other code creates the folder: it would come back after another writer has deleted it.
            self.storage.make(name)
            if tensors:
                with self.storage.create(name, f"tensors-{rank}.safetensors") as stream:
                    file = tensor_file.write(stream, tensors, {key: part._asdict() for key, part in parts.items()})
            ranks = int(name.rpartition("-")[2])
            self._put_json(name, rank, {"name": name, "ranks": ranks, "writer": self.id, **facts, "file": file})
        except BaseException as error:
            with suppress(Exception):
                if self.writer.is_known(self.id):  # else files of these names may be those of another training
                    for written in (f"rank-{rank}.json", f"tensors-{rank}.safetensors"):
                        self.storage.remove(name, written)  # the next save deletes the rest
            if isinstance(error, FileExistsError):
                raise RuntimeError(
                    f"Checkpoint folder {self.storage.location} has files of another run under the name {name}, so "
                    f"that two runs seem to write to it; end one of them, or give it another folder"
                ) from None
            raise

    def mark_saved(self, name: str, reported: Mapping[str, Any]) -> None:
        """Record that all ranks have written a checkpoint, from which the training then continues.

        Args:
            name: its name.
            reported: the values that were passed to `report()` since the last one.
        """
        self._intact.add(name)
        self._reported[name] = dict(reported)
        self.current, self.restored_best = name, False

    def mark_best(self, name: str, reported: Mapping[str, Any]) -> None:
        """Add reported values to the JSON of a checkpoint; a reader finds all of them or none.

        Raises:
            OSError: if it cannot be written; the checkpoint is unchanged.
        """
        facts = parse_manifest(self.storage.read(name, MANIFEST).decode())
        self._put_json(name, 0, {**{key: facts[key] for key in facts if key != "seal"}, **reported})
        self._reported[name] = dict(reported)
        # Another writer may have deleted the checkpoint meanwhile, so that a store now has nothing but this JSON of it.
        if not self.writer.writes:
            self._intact.discard(name)
            if not self.is_intact(name):
                self.storage.remove(name, MANIFEST)

    def tidy(self, keep: int) -> None:
        """Keep the newest intact checkpoints, of `keep` different updates, and delete older checkpoints.

        For each criterion by which values were reported, the best intact checkpoint is kept, too, and those that may be
        better but cannot be read now. A damaged one stays until `keep` newer updates, or a newer save of the same
        update, are intact. One of another version stays. The writer records what is kept before anything is deleted.

        Raises:
            RuntimeError: if another process has become the writer.
        """
        self.writer.check()
        to_delete = list[str]()
        if not self.restored_best:  # a save was made since the restore of the best one
            to_delete, self.left = self.left, []
        reported, kept_updates = list[tuple[str, dict[str, Any] | None]](), set[int]()
        for name in (name for name in self.names() if name not in to_delete):
            with suppress(VersionError):
                reported.append((name, self.reported(name)))
        criteria = filter(None, {Criterion.of_manifest(facts or {}) for _, facts in reported})
        # Those that cannot be read now, though perhaps later, may be the best ones, too.
        best = {name for name, facts in reported if facts is None and self._check_intact(name) is None}
        for criterion in criteria:
            for name in _best_first(criterion, reported):
                intact = self._check_intact(name)  # None: it cannot be read now
                if intact is not False:
                    best.add(name)
                if intact:  # all that follow are worse
                    break
        for name, _ in reported:
            update = update_of(name)
            if update not in kept_updates and len(kept_updates) < keep:
                if self.is_intact(name):
                    kept_updates.add(update)
            elif name not in best:
                to_delete.append(name)
        self.writer.renew(newest=self.current, best=" ".join(sorted(best)))
        for name in to_delete:
            self.discard(name)

    def discard(self, name: str) -> None:
        """Delete the files of a checkpoint, as far as possible, and its folder if nothing else is in it.

        If another writer has taken over, or the folder was deleted and created again, nothing is deleted.
        """
        if not self.writer.writes:
            return
        self._intact.discard(name)
        self._reported.pop(name, None)
        with suppress(*DAMAGE):
            for file in sorted(self.storage.names(name)):  # rank-0.json first, without which it is no checkpoint
                if _FILE.fullmatch(file):
                    self.storage.remove(name, file)
            if self.storage.on_disk:
                self.storage.remove(name)

    def _put_json(self, name: str, rank: int, facts: Mapping[str, Any]) -> None:
        """Write the JSON of a rank with its checksum; rank 0 checks before that this process is still the writer."""
        if not rank:
            self.writer.check()
        self.storage.put(write_manifest(facts), name, f"rank-{rank}.json")


def is_name(name: str) -> bool:
    """Return whether a folder of this name is a checkpoint, perhaps an incomplete one."""
    return _NAME.fullmatch(name) is not None


def update_of(name: str) -> int:
    """Return the number of updates after which a checkpoint was saved, from its name."""
    return int(name.split("-")[1])


def _order(name: str) -> tuple[int, int]:
    """Return two numbers by which a later checkpoint compares greater: of its writer, and of the writer's save.

    >>> _order("update-00000812-0003-1-2")
    (3, 1)
    """
    _update, writer, save, _ranks = map(int, _NAME.fullmatch(name).groups())  # type: ignore[union-attr]
    return writer, save


def _best_first(criterion: Criterion, reported: Iterable[tuple[str, Mapping[str, Any] | None]]) -> list[str]:
    """Return the names of the checkpoints, the best first, without those that have no score.

    Args:
        criterion: what is compared, such as the lowest loss; a lower score is better, and infinity means no score.
        reported: (name, what was reported when it was saved), or (name, None) if the JSON of a checkpoint is damaged.
    """
    may_be_the_best = -math.inf  # so that a damaged checkpoint is not deleted
    scored = []
    for name, facts in reported:
        score = may_be_the_best if facts is None else criterion.score(facts)
        scored.append((score, _order(name), name))
    return [name for score, _, name in sorted(scored) if score < math.inf]
