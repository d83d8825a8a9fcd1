"""A folder of checkpoints: each one is published atomically, and its checksum shows later damage.

A checkpoint is a folder `update-00001234` with the files of the state and a manifest. It is written under a name that
begins with a dot, by one rank or several, flushed to disk and then renamed; a checkpoint is renamed to such a name
before it is deleted. A name without a dot therefore never belongs to an incomplete checkpoint.

Users keep other files in the same folder. What is deleted is therefore recognized as a checkpoint of this package: a
folder with nothing but these files in it, and with a sealed manifest or a name `.update-00001234.part` or `.old`.
"""

from __future__ import annotations

import functools
import math
import os
import re
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, final
from uuid import uuid4

from variable_batch_size.checkpoint.best import Criterion
from variable_batch_size.checkpoint.hashed_file import HashingWriter
from variable_batch_size.checkpoint.manifest import (
    DAMAGE,
    MANIFEST,
    StateFile,
    facts_of_files,
    flush_file,
    is_file_name,
    sealed_manifest,
    verified_manifest,
    write_manifest,
)

LOCK = ".lock"

_NAME = re.compile(r"update-([0-9]{8}|[1-9][0-9]{8,})(?:-([1-9][0-9]*))?")  # the name of each revision is unique
_LEFTOVER = re.compile(rf"\.{_NAME.pattern}\.(?:part|old)")
_unlock_by_file: dict[int, weakref.finalize[[int], CheckpointFolder]] = {}  # of the locked files, by descriptor


@final
class Entry(NamedTuple):
    """The name of a checkpoint, intact, damaged or of another program; a larger entry is newer.

    Each further save of the same update is another revision. The previous revision stays until the new one is
    published.
    """

    update: int
    revision: int
    path: Path


@final
class CheckpointFolder:
    """The checkpoints in one folder, which has at most one writer.

    Args:
        path: path of the folder; `lock` creates it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unlock: weakref.finalize[[int], CheckpointFolder] | None = None
        self._verified: set[Path] = set()  # `prune` verifies the others before it deletes an older one

    def lock(self) -> str:
        """Create the folder and lock it against other writers, until `unlock` or any end of this process.

        Returns:
            A token, by which other ranks see whether their folder of this name is the same one.

        Raises:
            OSError: if the folder cannot be created or is itself a checkpoint, another writer has locked it, or the
                file `.lock` in it belongs to another program.
        """
        import fcntl  # not on Windows, where the package can still be imported

        if _is_checkpoint(self.path):
            raise OSError(
                f"dir must be the folder of a training, got the checkpoint {self.path}; pass the folder that it is in"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not b"process ".startswith(os.read(file, 8)):
                raise OSError(
                    f"Checkpoint folder {self.path} must not hold a file {LOCK} of another program; choose another "
                    f"folder, or delete that file"
                )
            token = uuid4().hex
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n{token}\n".encode(), 0)
            os.fsync(file)  # on network file systems, for other hosts
        except BlockingIOError:
            writer = os.read(file, 1000).decode(errors="replace").partition("\n")[0].strip()
            os.close(file)
            raise OSError(
                f"Checkpoint folder {self.path} is in use by {writer or 'another writer'}; close() that Checkpoint, "
                f"or choose another folder"
            ) from None
        except BaseException:
            os.close(file)
            raise
        self._unlock = _unlock_by_file[file] = weakref.finalize(self, _unlock_file, file)
        _reset_after_fork()
        return token

    def unlock(self) -> None:
        """Let other writers lock the folder."""
        if self._unlock is not None:
            self._unlock()

    def is_shared(self, token: str) -> bool:
        """Return whether this process can write to the folder that was locked with this token.

        It may see another folder of this name, as on a disk of its own.
        """
        with suppress(*DAMAGE):
            return (self.path / LOCK).read_text().splitlines()[1] == token and os.access(self.path, os.W_OK)
        return False

    def trust(self, path: Path) -> None:
        """Record that the checkpoint at `path` is intact, so that it is not read to find out."""
        self._verified.add(path)

    def entries(self) -> list[Entry]:
        """Return everything that has the name of a checkpoint, newest first; it is not verified."""
        names = [(_NAME.fullmatch(path.name), path) for path in self.path.glob("update-*")]
        return sorted((Entry(int(m[1]), int(m[2] or 0), path) for m, path in names if m), reverse=True)

    def newer_than(self, path: Path) -> list[Path]:
        """Return the entries that are newer than the one at `path`, newest first; none if it is missing."""
        paths = [entry.path for entry in self.entries()]
        return paths[: paths.index(path)] if path in paths else []

    def next_path(self, update: int) -> Path:
        """Return the path at which to publish the next checkpoint of `update`.

        Raises:
            RuntimeError: if this object has not locked the folder.
        """
        if self._unlock is None or not self._unlock.alive:
            raise RuntimeError(
                f"Checkpoint folder {self.path} is not locked by this Checkpoint, which was closed or is in a forked "
                f"process; create another Checkpoint"
            )
        revision = max((entry.revision + 1 for entry in self.entries() if entry.update == update), default=0)
        while True:
            path = self.path / (f"update-{update:08d}" + (f"-{revision}" if revision else ""))
            part = _part_of(path)
            if not os.path.lexists(part) or _is_leftover(part):
                return path
            revision += 1  # that name belongs to another program

    def begin(self, target: Path) -> None:
        """Create the place where a checkpoint is written, before any rank writes.

        Args:
            target: the path that `next_path` returned.

        Raises:
            OSError: if it cannot be created.
        """
        self._delete_leftovers()
        _part_of(target).mkdir()

    def write(self, target: Path, name: str, write: Callable[[IO[bytes]], None]) -> StateFile:
        """Write a file of the checkpoint, flush it to disk, and return its description.

        Args:
            target: path at which the checkpoint will be published.
            name: name of the file.
            write: writes the contents to the file that it gets.

        Raises:
            OSError: if the file cannot be written.
        """
        with (_part_of(target) / name).open("xb") as file:
            hashing = HashingWriter(file)
            write(hashing)  # type: ignore[arg-type]
            if hashing.error is not None:
                raise hashing.error
            flush_file(file)
        return StateFile(name, hashing.bytes, hashing.digest.hexdigest())

    def publish(self, target: Path, facts: Mapping[str, Any], files: Sequence[StateFile]) -> None:
        """Rename a checkpoint to `target`; all of its files have been written.

        Args:
            target: path at which the checkpoint is published.
            facts: further entries of the manifest.
            files: the files of the state, that of rank 0 first.

        Raises:
            OSError: if the manifest cannot be written; nothing of the checkpoint remains.
        """
        part = _part_of(target)
        try:
            write_manifest(part, {**facts, **facts_of_files(files)})
            _flush_folder(part)
            part.rename(target)
        except BaseException:
            _delete(part)
            raise
        _flush_folder(self.path)
        self.trust(target)

    def abandon(self, target: Path) -> None:
        """Delete what has been written of a checkpoint."""
        _delete(_part_of(target))

    def mark(self, entry: Entry, facts: Mapping[str, Any]) -> None:
        """Add facts to the manifest of a checkpoint, which holds all of them or none at any instant.

        Raises:
            OSError: if the manifest cannot be written; the checkpoint is unchanged.
        """
        self._delete_leftovers()
        manifest = sealed_manifest(entry.path)
        del manifest["seal"]
        part = _part_of(self.next_path(entry.update))
        part.mkdir()
        try:
            write_manifest(part, {**manifest, **facts})
            (part / MANIFEST).replace(entry.path / MANIFEST)
            _flush_folder(entry.path)
        finally:
            _delete(part)

    def prune(self, keep: int) -> None:
        """Keep the newest `keep` intact updates, each in its newest intact revision, and delete older entries.

        Of each criterion that was reported, the best intact checkpoint is kept, too. A damaged entry stays until `keep`
        newer updates, or a newer revision of the same update, are intact. One whose manifest is damaged always stays,
        because it may belong to another program.
        """
        kept: set[int] = set()
        criteria = {Criterion.of(manifest) for _, manifest in self._manifests()} - {None}
        best = {self.best(criterion) for criterion in criteria}
        for update, _, path in self.entries():
            if update not in kept and len(kept) < keep:
                if self._is_intact(path):
                    kept.add(update)
            elif path not in best:
                self._discard(path)

    def discard_after(self, path: Path) -> None:
        """Delete the checkpoints that are newer than the one at `path`, the newest first."""
        for newer in self.newer_than(path):
            self._discard(newer)

    def candidates(self, *, best: bool, criterion: Criterion | None = None) -> list[Path]:
        """Return the checkpoints in the order in which to try them: the newest first, or the best, see `ranked`."""
        return self.ranked(criterion) if best else [entry.path for entry in self.entries()]

    def ranked(self, criterion: Criterion | None = None) -> list[Path]:
        """Return the checkpoints with a reported value, the best first, and of equal ones the oldest.

        Those with a damaged manifest precede them, because any of them may be the best.

        Args:
            criterion: what is compared; by default, that of the newest checkpoint that has one.
        """
        manifests = self._manifests()
        criterion = criterion or next(filter(None, (Criterion.of(manifest) for _, manifest in manifests)), None)
        if criterion is None:
            return []
        ranks = [(criterion.rank(manifest) if manifest else -math.inf, entry) for entry, manifest in manifests]
        return [entry.path for rank, entry in sorted(ranks) if rank < math.inf]

    def best(self, criterion: Criterion | None = None) -> Path | None:
        """Return the first intact checkpoint of `ranked`, or None."""
        return next(filter(self._is_intact, self.ranked(criterion)), None)

    def is_better(self, facts: Mapping[str, Any], criterion: Criterion) -> bool:
        """Return whether reported values are better than those of every intact checkpoint."""
        best = self.best(criterion)
        return criterion.rank(facts) < (criterion.rank(sealed_manifest(best)) if best else math.inf)

    def newest(self, after: int = -1) -> Entry | None:
        """Return the newest intact checkpoint of a later update than `after`, or None."""
        return next((entry for entry in self.entries() if entry.update > after and self._is_intact(entry.path)), None)

    def _manifests(self) -> list[tuple[Entry, dict[str, Any]]]:
        """Return the entries with their manifests, empty if damaged; newest first."""
        found: list[tuple[Entry, dict[str, Any]]] = [(entry, {}) for entry in self.entries()]
        for entry, manifest in found:
            with suppress(*DAMAGE):
                manifest.update(sealed_manifest(entry.path))
        return found

    def _discard(self, path: Path) -> None:
        """Delete a checkpoint, and nothing else."""
        if _is_checkpoint(path):
            self._verified.discard(path)
            old = path.with_name(f".{path.name}.old")
            with suppress(OSError):  # the next save deletes what remains
                if not os.path.lexists(old):
                    _delete(path.rename(old))

    def _is_intact(self, path: Path) -> bool:
        if path not in self._verified and verified_manifest(path) is not None:
            self._verified.add(path)
        return path in self._verified

    def _delete_leftovers(self) -> None:
        """Delete the incomplete and half-deleted checkpoints of writers that were killed."""
        for path in self.path.glob(".update-*"):
            if _is_leftover(path):
                _delete(path)


def _part_of(target: Path) -> Path:
    """Return the path at which the checkpoint is written."""
    return target.with_name(f".{target.name}.part")


def _holds_nothing_else(path: Path) -> bool:
    """Return whether `path` is a folder, and not a link, without anything but the files of a checkpoint."""
    try:
        with os.scandir(path) as contents:
            return not path.is_symlink() and all(
                is_file_name(item.name) and item.is_file(follow_symlinks=False) for item in contents
            )
    except OSError:
        return False


def _is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, of which the state may be damaged, and nothing else."""
    try:
        return _holds_nothing_else(path) and bool(sealed_manifest(path))
    except DAMAGE:
        return False


def _is_leftover(path: Path) -> bool:
    """Return whether a folder is an incomplete or half-deleted checkpoint, and nothing else."""
    return _LEFTOVER.fullmatch(path.name) is not None and _holds_nothing_else(path)


def _delete(path: Path) -> None:
    """Delete the files of a checkpoint, and its folder if nothing else is in it."""
    with suppress(OSError):
        for file in list(path.iterdir()):
            if is_file_name(file.name):
                file.unlink(missing_ok=True)
        path.rmdir()


def _flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, as POSIX requires after a file is created or renamed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlock_file(file: int) -> None:
    del _unlock_by_file[file]
    os.close(file)


@functools.cache
def _reset_after_fork() -> None:
    """Close the locked files in forked children, which share the lock: a child must neither hold it nor release it."""

    def close_all() -> None:
        for unlock in list(_unlock_by_file.values()):
            unlock()

    os.register_at_fork(after_in_child=close_all)
