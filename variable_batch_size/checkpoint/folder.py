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
        id: random text of the writer, which all ranks of it have; "" where nothing is written.
        goes_on: whether the training in memory has saved or restored here before this object was created.
        current: the checkpoint that this process has restored or saved last, on the writer; "" before that.
        branches: whether that was restored as the best one, and nothing was saved since then.
        left: checkpoints that were newer than it, on the writer, which the next save deletes.
    """

    def __init__(self, location: str | os.PathLike[str], run: str | None = None) -> None:
        self.storage = Storage(location)
        self.writer = Writer(self.storage, run)
        self.id, self.goes_on = "", False
        self.current, self.branches, self.left = "", False, list[str]()
        self._saves = 0
        self._earlier = list[str]()  # checkpoints that were there when this process became the writer
        self._intact = set[str]()  # names of checkpoints that are not read again to find out
        self._reported = dict[str, dict[str, Any]]()  # on the writer, which alone changes it: see `reported`

    # Which checkpoints there are. -------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of the checkpoints, the newest first; they are not verified."""
        return self._list_all()[0]

    def _list_all(self) -> tuple[list[str], dict[str, set[str]]]:
        """Return the checkpoints, the newest first; and all other names in the folder with the files in them."""
        listed = self.storage.listed()
        whole = [
            name
            for name, files in listed.items()
            if (match := _NAME.fullmatch(name))
            and (ranks := int(match[4])) <= len(files)  # first: a name may have any number
            and files >= {f"rank-{rank}.json" for rank in range(ranks)}
        ]
        return sorted(whole, key=_order, reverse=True), {name: listed[name] for name in listed.keys() - whole}

    def candidates(self, *, best: bool, criterion: Criterion | None = None) -> list[str]:
        """Return the checkpoints in the order in which to try them: the newest first, or the best, see `best_first`.

        Raises:
            VersionError: if there are only checkpoints whose names are of another version.
        """
        names, others = self._list_all()
        unknown = [
            name for name in others if name.startswith("update-") and any(others[name]) and not _NAME.fullmatch(name)
        ]
        if not names and unknown:
            raise VersionError(
                f"Checkpoint {self.storage.at(max(unknown))} must have version {VERSION} of the format {FORMAT}, got "
                f"the name of another version; go on with the release that saved it, or choose another folder"
            )
        return self.best_first(criterion) if best else names

    def incomplete(self) -> list[str]:
        """Return what is no checkpoint, as files of ranks are missing; newest first."""
        return sorted(filter(_NAME.fullmatch, self._list_all()[1]), key=_order, reverse=True)

    def lost(self, *, best: bool = False) -> dict[str, str]:
        """Return the newest checkpoint that was saved, or the best ones, and what is missing, if they are not there."""
        newest, bests = self.writer.last_saved()  # before the list, in which it is then, or a newer one
        names, others = self._list_all()
        lost = [name for name in bests if name not in names]
        if best and lost:  # unless a training has meanwhile found a better one, and deleted it
            lost = [name for name in self.writer.last_saved()[1] if name in lost]
        if not best:
            lost = [newest] if _NAME.fullmatch(newest) and not (names and _order(names[0]) >= _order(newest)) else []
        return {name: "the JSON of a rank is missing" if name in others else "its folder is missing" for name in lost}

    def newest(self) -> str | None:
        """Return the newest intact checkpoint, or None."""
        return self._first_intact(self.names)

    def _first_intact(self, listed: Callable[[], list[str]]) -> str | None:
        """Return the first intact checkpoint of a list, or None.

        It lists again after each one that is not: a training may have saved meanwhile, and deleted what was listed.
        """
        tried = set[str]()
        while names := [name for name in listed() if name not in tried]:
            if self.is_intact(names[0]):
                return names[0]
            tried.add(names[0])
        return None

    def best_first(self, criterion: Criterion | None = None) -> list[str]:
        """Return the checkpoints with a reported value, the best first, and of equal ones the oldest.

        Those with a damaged JSON precede them, because any of them may be the best.
        """
        reported = [(name, self.reported(name)) for name in self.names()]
        criterion = criterion or next(filter(None, (Criterion.of_manifest(facts or {}) for _, facts in reported)), None)
        return _best_first(criterion, reported) if criterion else [name for name, facts in reported if facts is None]

    def best(self, criterion: Criterion | None = None) -> str | None:
        """Return the first intact checkpoint of `best_first`, or None."""
        return self._first_intact(partial(self.best_first, criterion))

    def is_better(self, facts: Mapping[str, Any], criterion: Criterion) -> bool:
        """Return whether reported values are better than those of every intact checkpoint."""
        best = self.best(criterion)
        return criterion.score(facts) < (criterion.score(self.reported(best) or {}) if best else math.inf)

    def reported(self, name: str) -> dict[str, Any] | None:
        """Return what was reported of a checkpoint; None if its JSON is damaged."""
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
        """Return whether all bytes of a checkpoint are as they were written; they are read once."""
        return self._check_intact(name) is True

    def _check_intact(self, name: str) -> bool | None:
        """Return whether a checkpoint is intact; None if a disk does not say it now."""
        if name not in self._intact:
            try:
                verify(self.storage, name)
            except DamagedError as error:
                return None if error.temporary else False
            self._intact.add(name)
        return True

    # What the writer does. --------------------------------------------------------------------------------------------

    def lock(self) -> str:
        """Create the folder, become its writer, and return a token by which other ranks recognize the folder.

        Raises:
            OSError: if the folder cannot be created or is itself a checkpoint, or another process writes there.
        """
        try:
            self.storage.make()
            if MANIFEST in (names := self.storage.names()):
                raise OSError(
                    f"dir must be the folder of a training, got the checkpoint {self.storage.location}; pass the "
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
        """Record that the training goes on from an intact checkpoint, which it has restored."""
        self._intact.add(name)
        names = self.names() if best and self.writer.number else []
        self.left = names[: names.index(name)] if name in names else []
        self.current, self.branches, self._earlier = name, best, []

    def begin(self, update: int, ranks: int) -> str:
        """Return the name of the next checkpoint, and delete what ranks that were killed have left.

        Raises:
            ValueError: if the folder had a checkpoint that the training has neither saved nor restored.
            RuntimeError: if this process is not the writer.
        """
        self.writer.check()
        names, others = self._list_all()
        left = [name for name in self._earlier if name in names and (not self.goes_on or update_of(name) > update)]
        if other := next(filter(self.is_intact, left), None):
            raise ValueError(
                f"Checkpoint {self.storage.at(other)} is not one of this training, which has made {update} updates, "
                f"and saves would delete it; restore() it first; another folder begins another training"
            )
        for name in filter(_NAME.fullmatch, others):
            self.discard(name)
        self._saves += 1
        return f"update-{update:08d}-{self.writer.number:04d}-{self._saves}-{ranks}"

    def write(
        self, name: str, rank: int, tensors: Mapping[str, Tensor], parts: Mapping[str, Part], facts: Mapping[str, Any]
    ) -> None:
        """Write what a rank has of a checkpoint, which exists when all ranks have done so.

        Raises:
            OSError: if it cannot be written.
            RuntimeError: on rank 0, if another process has become the writer; if another training has these files.
        """
        file = None
        try:
            self.storage.make(name)  # here alone, so that nothing else makes a folder again that another writer deletes
            if tensors:
                with self.storage.create(name, f"tensors-{rank}.safetensors") as stream:
                    file = tensor_file.write(stream, tensors, {key: part._asdict() for key, part in parts.items()})
            ranks = int(name.rpartition("-")[2])
            self._put_json(name, rank, {"name": name, "ranks": ranks, "writer": self.id, **facts, "file": file})
        except BaseException as error:
            with suppress(Exception):
                if self.writer.is_known(self.id):  # else what has these names may be of another training
                    for written in (f"rank-{rank}.json", f"tensors-{rank}.safetensors"):
                        self.storage.remove(name, written)  # the next save deletes the rest
            if isinstance(error, FileExistsError):
                raise RuntimeError(
                    f"Checkpoint folder {self.storage.location} has files of another training under the name {name}, "
                    f"as if it was deleted and begun again; end one of the two"
                ) from None
            raise

    def mark_saved(self, name: str, reported: Mapping[str, Any]) -> None:
        """Record that all ranks have written a checkpoint, and what was reported of it."""
        self._intact.add(name)
        self._reported[name] = dict(reported)
        self.current, self.branches = name, False

    def mark_best(self, name: str, reported: Mapping[str, Any]) -> None:
        """Add reported values to the JSON of a checkpoint, which holds all of them or none at any instant.

        Raises:
            OSError: if it cannot be written; the checkpoint is unchanged.
        """
        facts = parse_manifest(self.storage.read(name, MANIFEST).decode())
        self._put_json(name, 0, {**{key: facts[key] for key in facts if key != "seal"}, **reported})
        self._reported[name] = dict(reported)
        if not self.writer.writes:  # another one may have deleted it meanwhile, of which a store keeps the new JSON
            self._intact.discard(name)
            if not self.is_intact(name):
                self.storage.remove(name, MANIFEST)

    def tidy(self, keep: int) -> None:
        """Keep the newest `keep` intact updates, each in its newest intact save, and delete older checkpoints.

        Of each criterion that was reported, the best intact checkpoint is kept, too, and what may be better but cannot
        be read now. A damaged one stays until `keep` newer updates, or a newer save of the same update, are intact, and
        one of another version stays. What is kept is recorded first.

        Raises:
            RuntimeError: if another process has become the writer.
        """
        self.writer.check()
        left, self.left = ([], self.left) if self.branches else (self.left, [])
        reported, kept_updates = list[tuple[str, dict[str, Any] | None]](), set[int]()
        for name in (name for name in self.names() if name not in left):
            with suppress(VersionError):
                reported.append((name, self.reported(name)))
        criteria = filter(None, {Criterion.of_manifest(facts or {}) for _, facts in reported})
        best = {name for name, facts in reported if facts is None and self._check_intact(name) is None}
        for criterion in criteria:
            for name in _best_first(criterion, reported):
                intact = self._check_intact(name)
                if intact is not False:
                    best.add(name)
                if intact:
                    break
        old = [*left]
        for name, _ in reported:
            update = update_of(name)
            if update not in kept_updates and len(kept_updates) < keep:
                if self.is_intact(name):
                    kept_updates.add(update)
            elif name not in best:
                old.append(name)
        self.writer.renew(newest=self.current, best=" ".join(sorted(best)))
        for name in old:
            self.discard(name)

    def discard(self, name: str) -> None:
        """Delete the files of a checkpoint, and its folder if nothing else is in it; what cannot be, stays.

        If another writer has taken over, or the folder was deleted and begun again, nothing is this one's to delete.
        """
        if not self.writer.writes:
            return
        self._intact.discard(name)
        self._reported.pop(name, None)
        with suppress(*DAMAGE):
            for file in sorted(self.storage.names(name)):  # that of rank 0 is first
                if _FILE.fullmatch(file):
                    self.storage.remove(name, file)
            if self.storage.on_disk:
                self.storage.remove(name)

    def _put_json(self, name: str, rank: int, facts: Mapping[str, Any]) -> None:
        """Write the JSON of a rank, sealed; that of rank 0 only while this process is the writer."""
        if not rank:
            self.writer.check()
        self.storage.put(write_manifest(facts), name, f"rank-{rank}.json")


def is_name(name: str) -> bool:
    """Return whether a folder of this name is a checkpoint, or a part of one."""
    return _NAME.fullmatch(name) is not None


def update_of(name: str) -> int:
    """Return the update of a checkpoint."""
    return int(name.split("-")[1])


def _order(name: str) -> tuple[int, int]:
    """Return the numbers of the writer of a checkpoint and of its save, which tell what is newer."""
    _, writer, save, _ = map(int, _NAME.fullmatch(name).groups())  # type: ignore[union-attr]
    return writer, save


def _best_first(criterion: Criterion, reported: Iterable[tuple[str, Mapping[str, Any] | None]]) -> list[str]:
    """Return the checkpoints by the score of what was reported, None first; without those that have no score."""
    ranks = [(-math.inf if facts is None else criterion.score(facts), _order(name), name) for name, facts in reported]
    return [name for rank, _, name in sorted(ranks) if rank < math.inf]
