"""A folder of checkpoints: each one is published atomically, and its checksum shows later damage.

A checkpoint is a folder `update-00001234` with two files: the state, and a manifest in JSON that holds the size and
SHA-256 of the state and, under "seal", the SHA-256 of itself. It is written under a name that begins with a dot,
flushed to disk and then renamed; a checkpoint is renamed to such a name before it is deleted. A name without a dot
therefore never belongs to an incomplete checkpoint.

Users keep other files in the same folder. What is deleted is therefore recognized as a checkpoint of this package: a
folder with nothing but these two files in it, and with a sealed manifest or a name `.update-00001234.part` or `.old`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import socket
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, final

from variable_batch_size.checkpoint.best import Criterion

STATE, MANIFEST, LOCK = "state.pt", "manifest.json", ".lock"

_NAME = re.compile(r"update-([0-9]{8}|[1-9][0-9]{8,})(?:-([1-9][0-9]*))?")  # the name of each revision is unique
_LEFTOVER = re.compile(rf"\.{_NAME.pattern}\.(?:part|old)")
_BLOCK = 1 << 20  # bytes
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)  # while reading any contents

_unlock_by_file: dict[int, weakref.finalize[[int], CheckpointFolder]] = {}  # of the locked files, by descriptor


def verified_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of the checkpoint in `folder` if its checksums match, else None."""
    try:
        manifest = _sealed_manifest(folder)
        state, expected = folder / STATE, manifest["file"]
        if state.stat().st_size != expected["bytes"]:
            return None
        with state.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(_BLOCK):
                digest.update(block)
        return manifest if digest.hexdigest() == expected["sha256"] else None
    except _DAMAGE:
        return None


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

    def lock(self) -> None:
        """Create the folder and lock it against other writers, until `unlock` or any end of this process.

        Raises:
            OSError: if the folder cannot be created, another writer has locked it, or the file `.lock` in it belongs to
                another program.
        """
        import fcntl  # not on Windows, where the package can still be imported

        self.path.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not b"process ".startswith(os.read(file, 8)):
                raise OSError(
                    f"Checkpoint folder {self.path} must not hold a file {LOCK} of another program; choose another "
                    f"folder, or delete that file"
                )
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError:
            writer = os.read(file, 1000).decode(errors="replace").strip()
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

    def unlock(self) -> None:
        """Let other writers lock the folder."""
        if self._unlock is not None:
            self._unlock()

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

    def publish(self, target: Path, facts: Mapping[str, Any], write: Callable[[IO[bytes]], None]) -> None:
        """Write a checkpoint and rename it to `target` when it is complete.

        Args:
            target: the path that `next_path` returned.
            facts: entries of the manifest.
            write: writes the state to the file that it gets.

        Raises:
            OSError: if the checkpoint cannot be written; nothing of it remains.
        """
        self._delete_leftovers()
        part = _part_of(target)
        part.mkdir()
        try:
            with (part / STATE).open("wb") as file:
                hashing = _HashingFile(file)
                write(hashing)  # type: ignore[arg-type]
                if hashing.error is not None:
                    raise hashing.error
                _flush_file(file)
            description = {"name": STATE, "bytes": hashing.bytes, "sha256": hashing.digest.hexdigest()}
            _write_manifest(part, {**facts, "file": description})
            _flush_folder(part)
            part.rename(target)
        except BaseException:
            _delete(part)
            raise
        _flush_folder(self.path)
        self._verified.add(target)

    def mark(self, entry: Entry, facts: Mapping[str, Any]) -> None:
        """Add facts to the manifest of a checkpoint, which holds all of them or none at any instant.

        Raises:
            OSError: if the manifest cannot be written; the checkpoint is unchanged.
        """
        self._delete_leftovers()
        manifest = _sealed_manifest(entry.path)
        del manifest["seal"]
        part = _part_of(self.next_path(entry.update))
        part.mkdir()
        try:
            _write_manifest(part, {**manifest, **facts})
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
        return criterion.rank(facts) < (criterion.rank(_sealed_manifest(best)) if best else math.inf)

    def newest(self, after: int = -1) -> Entry | None:
        """Return the newest intact checkpoint of a later update than `after`, or None."""
        return next((entry for entry in self.entries() if entry.update > after and self._is_intact(entry.path)), None)

    def _manifests(self) -> list[tuple[Entry, dict[str, Any]]]:
        """Return the entries with their manifests, empty if damaged; newest first."""
        found: list[tuple[Entry, dict[str, Any]]] = [(entry, {}) for entry in self.entries()]
        for entry, manifest in found:
            with suppress(*_DAMAGE):
                manifest.update(_sealed_manifest(entry.path))
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


@final
class _HashingFile:
    """A file that is written sequentially, with the SHA-256 of what is written.

    It keeps its first OSError instead of raising it, because `torch.save` would replace it with an error of its own.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest, self.bytes = hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, block: Any) -> int:
        self.digest.update(block)
        self.bytes += len(block)
        try:
            if self.error is None:
                self._file.write(block)
        except OSError as error:
            self.error = error
        return len(block)

    def flush(self) -> None:
        """Do nothing: `publish` flushes the file once, at the end."""


def _part_of(target: Path) -> Path:
    """Return the path at which the checkpoint is written."""
    return target.with_name(f".{target.name}.part")


def _holds_nothing_else(path: Path) -> bool:
    """Return whether `path` is a folder, and not a link, without anything but the two files of a checkpoint."""
    try:
        with os.scandir(path) as contents:
            return not path.is_symlink() and all(
                item.name in (STATE, MANIFEST) and item.is_file(follow_symlinks=False) for item in contents
            )
    except OSError:
        return False


def _is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, of which the state may be damaged, and nothing else."""
    try:
        return _holds_nothing_else(path) and bool(_sealed_manifest(path))
    except _DAMAGE:
        return False


def _is_leftover(path: Path) -> bool:
    """Return whether a folder is an incomplete or half-deleted checkpoint, and nothing else."""
    return _LEFTOVER.fullmatch(path.name) is not None and _holds_nothing_else(path)


def _delete(path: Path) -> None:
    """Delete the files of a checkpoint, and its folder if nothing else is in it."""
    with suppress(OSError):
        for name in (STATE, MANIFEST):
            (path / name).unlink(missing_ok=True)
        path.rmdir()


def _sealed_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; raise one of `_DAMAGE` if it is missing or has another checksum."""
    return _parse_manifest((folder / MANIFEST).read_bytes().decode())


def _write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    with (folder / MANIFEST).open("w", encoding="utf-8", newline="\n") as manifest:
        manifest.write(_format_manifest(facts))
        _flush_file(manifest)


def _format_manifest(facts: Mapping[str, Any]) -> str:
    """Return the facts and their SHA-256 as JSON text; equal facts give equal text."""
    seal = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return json.dumps({**facts, "seal": seal}, indent=2, sort_keys=True) + "\n"


def _parse_manifest(text: str) -> dict[str, Any]:
    """Return the facts, with their SHA-256, of a text that `_format_manifest` returned; raise ValueError for others."""
    manifest: dict[str, Any] = json.loads(text)
    facts = {key: value for key, value in manifest.items() if key != "seal"}
    if _format_manifest(facts) != text:
        raise ValueError("checksum mismatch")
    return manifest


def _flush_file(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


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
