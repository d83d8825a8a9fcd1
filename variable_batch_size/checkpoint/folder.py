"""A folder of checkpoints, on a disk or in an object store: which there are, which one is the best, which are deleted.

A checkpoint is a folder `update-00000812-0003-1-2`: of update 812, the first save of the writer 3, in 2 files of
tensors. Each rank that writes puts `tensors-1.safetensors` there and then `rank-1.json`, which says what is in it; that
of rank 0 has all else. The checkpoint exists when all these are there: no rank waits for another one to publish it. The
JSON of rank 0 is deleted first. Users keep other files in the same folder: only files of these names are deleted.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, final

from torch import Tensor

from variable_batch_size.checkpoint import seal, tensor_file
from variable_batch_size.checkpoint.best import Criterion
from variable_batch_size.checkpoint.rank_state import facts_of_tensors
from variable_batch_size.checkpoint.shards import Part
from variable_batch_size.checkpoint.storage import DAMAGE, Storage
from variable_batch_size.checkpoint.writer import Writer

FORMAT: Final = "vbs-checkpoint"
VERSION: Final = 2
MANIFEST: Final = "rank-0.json"

# A key that readers may ignore, and for which they have a default, is added without another version.
KEYS: Final = {
    *("format", "version", "name", "ranks", "file", "seal"),  # of the JSON of each rank
    *("library", "torch"),  # the others are in that of rank 0: what has written it,
    *("epoch", "step", "samples", "updates", "reads_epoch", "world", "batch_size"),  # the position,
    *("trace", "dataset_size", "seed", "shuffle", "drop_last"),  # what the samples follow from,
    *("best", "metrics"),  # what was reported,
    *("state", "random", "tensors"),  # states;
    "own",  # in that of another rank: the states and tensors that it has for itself
}

_NAME = re.compile(r"update-(\d{8,})-(\d{4,})-(\d+)-(\d+)")
_FILE = re.compile(r"rank-\d+\.json(\.new)?|tensors-\d+\.safetensors")
_EARLIER = re.compile(r"update-(\d{8,})(-\d+)?")  # of version 1


@final
class VersionError(ValueError):
    """A checkpoint has a version of the format that this library does not know."""


@final
class Folder:
    """The checkpoints in one folder, which has at most one writer.

    Args:
        location: a path, or a URL of fsspec.
        run: see `Writer`.
    """

    def __init__(self, location: str | os.PathLike[str], run: str | None = None) -> None:
        self.storage = Storage(location)
        self.writer = Writer(self.storage, run)
        self._saves = 0
        self._intact: set[str] = set()  # names of checkpoints that are not read again to find out
        self._reported: dict[str, dict[str, Any]] = {}  # on the writer, which alone changes it: see `reported`

    # Which checkpoints there are. -------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of the checkpoints, the newest first; they are not verified."""
        return self._list_all()[0]

    def candidates(self, *, best: bool, criterion: Criterion | None = None) -> list[str]:
        """Return the checkpoints in the order in which to try them: the newest first, or the best, see `best_first`.

        Raises:
            VersionError: if there are only checkpoints of version 1.
        """
        names, others = self._list_all()
        if not names and (earlier := sorted(filter(_EARLIER.fullmatch, others))):
            raise VersionError(
                f"Checkpoint {self.storage.at(earlier[-1])} must have version {VERSION} of the format {FORMAT}, got "
                f"version 1; finish that training with the release that saved it, or choose another folder"
            )
        return self.best_first(criterion) if best else names

    def _list_all(self) -> tuple[list[str], dict[str, set[str]]]:
        """Return the checkpoints, the newest first; and all other names in the folder with the files in them."""
        listed = self.storage.listed()
        whole = [
            name
            for name, files in listed.items()
            if (match := _NAME.fullmatch(name)) and files >= {f"rank-{rank}.json" for rank in range(int(match[4]))}
        ]
        first, earlier = self.writer.find_counting([_order(name)[1] for name in whole])
        names = [name for name in whole if _order(name)[1] >= first or name in earlier]
        return sorted(names, key=_order, reverse=True), {name: listed[name] for name in listed.keys() - names}

    def incomplete(self, after: int = -1) -> list[str]:
        """Return what is no checkpoint of a later update than `after`, as files of ranks are missing; newest first."""
        names = [name for name in self._list_all()[1] if _NAME.fullmatch(name) and update_of(name) > after]
        return sorted(names, key=_order, reverse=True)

    def newest(self, after: int = -1) -> str | None:
        """Return the newest intact checkpoint of a later update than `after`, or None."""
        return next((name for name in self.names() if update_of(name) > after and self.is_intact(name)), None)

    def newer_than(self, name: str) -> list[str]:
        """Return the checkpoints that are newer than this one, newest first; none if it is missing."""
        names = self.names()
        return names[: names.index(name)] if name in names else []

    def best_first(self, criterion: Criterion | None = None) -> list[str]:
        """Return the checkpoints with a reported value, the best first, and of equal ones the oldest.

        Those with a damaged JSON precede them, because any of them may be the best.
        """
        reported = [(name, self.reported(name)) for name in self.names()]
        criterion = criterion or next(filter(None, (Criterion.of_manifest(facts or {}) for _, facts in reported)), None)
        return _best_first(criterion, reported) if criterion else [name for name, facts in reported if facts is None]

    def best(self, criterion: Criterion | None = None) -> str | None:
        """Return the first intact checkpoint of `best_first`, or None."""
        return next(filter(self.is_intact, self.best_first(criterion)), None)

    def is_better(self, facts: Mapping[str, Any], criterion: Criterion) -> bool:
        """Return whether reported values are better than those of every intact checkpoint."""
        best = self.best(criterion)
        return criterion.score(facts) < (criterion.score(self.reported(best) or {}) if best else math.inf)

    def reported(self, name: str) -> dict[str, Any] | None:
        """Return what was reported of a checkpoint; None if its JSON is damaged."""
        if name in self._reported:
            return self._reported[name]
        try:
            manifest = unsealed(self.storage.read(name, MANIFEST).decode())
        except DAMAGE as error:
            self._check_damage(error, name)
            return None
        facts = {key: value for key, value in manifest.items() if key in ("best", "metrics")}
        if self.writer.number:
            self._reported[name] = facts
        return facts

    # What is in a checkpoint. -----------------------------------------------------------------------------------------

    def read_texts(self, name: str) -> list[str]:
        """Return the JSON of each rank that has written a checkpoint, that of rank 0 first.

        Raises:
            one of `DAMAGE`: if one is not there.
        """
        first = self.storage.read(name, MANIFEST).decode()
        others = range(1, _ranks_in(first))
        return [first, *(self.storage.read(name, f"rank-{rank}.json").decode() for rank in others)]

    def read(
        self,
        name: str,
        rank: int,
        file: Mapping[str, Any],
        dtypes: Mapping[str, str],
        wanted: Iterable[str],
        use: Callable[[str, Part, Tensor], object],
    ) -> None:
        """Read the `wanted` tensors of the file of a rank in their order, verify them, and pass each to `use`.

        Raises:
            one of `DAMAGE`: if the file is not intact.
        """
        chunks = file["chunks"]
        with self.storage.open(name, f"tensors-{rank}.safetensors") as stream:
            tensor_file.check(stream, file)
            for key in sorted(wanted, key=lambda key: int(chunks[key]["begin"])):
                part = Part(tuple(chunks[key]["offset"]), tuple(chunks[key]["shape"]))
                use(key, part, tensor_file.read(stream, chunks[key], dtypes[key]))

    def is_intact(self, name: str) -> bool:
        """Return whether all bytes of a checkpoint are as they were written; they are read once."""
        return self._check_intact(name) is True

    def _check_intact(self, name: str) -> bool | None:
        """Return whether a checkpoint is intact; None if a disk does not say it now."""
        if name in self._intact:
            return True
        try:
            ranks = manifests(self.read_texts(name), name)
            dtypes = {key: facts["dtype"] for key, facts in facts_of_tensors(ranks).items()}
            for rank, manifest in enumerate(ranks):
                if manifest["file"]:
                    self.read(name, rank, manifest["file"], dtypes, manifest["file"]["chunks"], lambda *_: None)
        except DAMAGE as error:
            self._check_damage(error, name)
            return None if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) else False
        self._intact.add(name)
        return True

    def _check_damage(self, error: BaseException, name: str) -> None:
        """Raise an error again that is none of damage: of another version, or of a store that cannot be reached."""
        if isinstance(error, VersionError):
            raise VersionError(f"Checkpoint {self.storage.at(name)} cannot be read: {error}") from None
        if not self.storage.is_damage(error):
            raise error

    def mark_intact(self, name: str, reported: Mapping[str, Any] | None = None) -> None:
        """Record that a checkpoint is intact, so that it is not read to find out, and what was reported of it."""
        self._intact.add(name)
        if reported is not None:
            self._reported[name] = dict(reported)

    # What the writer does. --------------------------------------------------------------------------------------------

    def lock(self) -> str:
        """Create the folder, become its writer, and return a token by which other ranks recognize the folder.

        Raises:
            OSError: if the folder cannot be created or is itself a checkpoint, or another process writes there.
        """
        try:
            self.storage.make()
            if MANIFEST in self.storage.names():
                raise OSError(
                    f"dir must be the folder of a training, got the checkpoint {self.storage.location}; pass the "
                    "folder that it is in"
                )
            orders = [_order(name) for name in self.storage.names() if _NAME.fullmatch(name)]
            self.writer.acquire(max((writer for _, writer, _, _ in orders), default=0))
            try:
                self.writer.record_known(self.names())
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
        return self.writer.token

    def is_shared(self, token: str) -> bool:
        """Return whether this process can write to the folder whose writer has this token.

        It may see another folder of this name, as on a disk of its own.
        """
        writable = not self.storage.on_disk or os.access(self.storage.location, os.W_OK)
        return writable and self.writer.is_known(token)

    def begin(self, update: int, ranks: int, restored_best: str = "") -> str:
        """Return the name of the next checkpoint, and delete what ranks that were killed have left.

        Checkpoints that are newer than `restored_best` are deleted, too.

        Raises:
            ValueError: if the folder has a checkpoint of a later update, from which the training does not come.
            RuntimeError: if this process is not the writer.
        """
        self.writer.check()
        for newer in self.newer_than(restored_best) if restored_best else ():
            self.discard(newer)
        names, others = self._list_all()
        later = next((name for name in names if update_of(name) > update and self.is_intact(name)), None)
        if later:
            raise ValueError(
                f"Checkpoint {self.storage.at(later)} is ahead of this training, which has made {update} updates; "
                f"restore() it first; another folder begins another training"
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
            RuntimeError: on rank 0, if another process has become the writer.
        """
        file = None
        try:
            if tensors:
                with self.storage.create(name, f"tensors-{rank}.safetensors") as stream:
                    file = tensor_file.write(stream, tensors, parts)
            self._put_json(name, rank, {"name": name, "ranks": _order(name)[3], **facts, "file": file})
        except BaseException:
            with suppress(Exception):
                for written in (f"rank-{rank}.json", f"tensors-{rank}.safetensors"):  # the next save deletes the rest
                    self.storage.remove(name, written)
            raise

    def tidy(self, keep: int) -> None:
        """Delete what is not kept, after a save of all ranks, and give a sign of life.

        Raises:
            RuntimeError: if another process became the writer before, to which the checkpoint may not count.
        """
        self.writer.check()
        self.prune(keep)
        self.writer.renew()

    def mark(self, name: str, reported: Mapping[str, Any]) -> None:
        """Add reported values to the JSON of a checkpoint, which holds all of them or none at any instant.

        Raises:
            OSError: if it cannot be written; the checkpoint is unchanged.
        """
        facts = unsealed(self.storage.read(name, MANIFEST).decode())
        self._put_json(name, 0, {**{key: facts[key] for key in facts if key != "seal"}, **reported})
        self._reported[name] = dict(reported)

    def prune(self, keep: int) -> None:
        """Keep the newest `keep` intact updates, each in its newest intact save, and delete older checkpoints.

        Of each criterion that was reported, the best intact checkpoint is kept, too, and what may be better but cannot
        be read now. A damaged one stays until `keep` newer updates, or a newer save of the same update, are intact, and
        one of another version stays.
        """
        reported, kept_updates = list[tuple[str, dict[str, Any] | None]](), set[int]()
        for name in self.names():
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
        for name, _ in reported:
            update = update_of(name)
            if update not in kept_updates and len(kept_updates) < keep:
                if self.is_intact(name):
                    kept_updates.add(update)
            elif name not in best:
                self.discard(name)

    def discard(self, name: str) -> None:
        """Delete the files of a checkpoint, and its folder if nothing else is in it; what cannot be, stays."""
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
        self.storage.put(sealed(facts), name, f"rank-{rank}.json")


def update_of(name: str) -> int:
    """Return the update of a checkpoint."""
    return _order(name)[0]


def sealed(facts: Mapping[str, Any]) -> str:
    """Return the JSON of a rank, with its checksum.

    Raises:
        ValueError: if a key is not in `KEYS`.
    """
    facts = {**facts, "format": FORMAT, "version": VERSION}
    if unknown := facts.keys() - KEYS:
        raise ValueError(f"the keys of a checkpoint's JSON must be in KEYS, got {', '.join(sorted(unknown))}; add them")
    return seal.sealed(facts)


def unsealed(text: str) -> dict[str, Any]:
    """Return the contents of a text that `sealed` returned, with the seal.

    Raises:
        VersionError: if it has another version.
        ValueError: if it is not intact.
    """
    facts = seal.unsealed(text)
    if facts.get("format") != FORMAT or type(facts.get("version")) is not int:
        raise ValueError(f"it is no JSON of {FORMAT}")
    if facts["version"] != VERSION:
        raise VersionError(
            f"a checkpoint must have version {VERSION} of the format {FORMAT}, got version {facts['version']}; install "
            f"the release of variable_batch_size that wrote it"
        )
    return facts


def manifests(texts: Iterable[str], name: str) -> list[dict[str, Any]]:
    """Return the contents of the JSON of each rank of a checkpoint.

    Raises:
        ValueError: if one is not intact, or that of another checkpoint.
    """
    by_rank = [unsealed(text) for text in texts]
    if any((manifest["name"], manifest["ranks"]) != (name, len(by_rank)) for manifest in by_rank):
        raise ValueError("the JSON of a rank is that of another checkpoint")
    return by_rank


def _ranks_in(text: str) -> int:
    return int(unsealed(text)["ranks"])


def _order(name: str) -> tuple[int, int, int, int]:
    """Return update, number of the writer, number of its save, and number of ranks of a checkpoint."""
    update, writer, save, ranks = map(int, _NAME.fullmatch(name).groups())  # type: ignore[union-attr]
    return update, writer, save, ranks


def _best_first(criterion: Criterion, reported: Iterable[tuple[str, Mapping[str, Any] | None]]) -> list[str]:
    """Return the checkpoints by the score of what was reported, None first; without those that have no score."""
    ranks = [(-math.inf if facts is None else criterion.score(facts), _order(name), name) for name, facts in reported]
    return [name for rank, _, name in sorted(ranks) if rank < math.inf]
