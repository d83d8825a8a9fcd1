"""Checkpoints as folders: published whole or not at all, and known when they are whole no longer.

A checkpoint is a folder `update-00001234` with two files: the state, and a manifest in JSON that tells the state's size
and SHA-256 and is sealed by its own. It is made under a name that begins with a dot, brought to the disk, and renamed;
what is given up is renamed to such a name before it is deleted. So a name without a dot never stands for a part of one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import socket
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, final

STATE, MANIFEST, LOCK = "state.pt", "manifest.json", ".lock"

_held: dict[int, weakref.finalize[[int], CheckpointFolder]] = {}  # what lets each locked file go

_NAME = re.compile(r"update-(\d{8,})(?:-(\d+))?")
_BLOCK = 1 << 20  # bytes


def whole(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint that is as it was published; None for anything else."""
    try:
        facts = _unsealed((folder / MANIFEST).read_bytes().decode())
        state, expected = folder / STATE, facts["file"]
        if state.stat().st_size != expected["bytes"]:
            return None
        with state.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(_BLOCK):
                digest.update(block)
        return facts if digest.hexdigest() == expected["sha256"] else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


@final
class Entry(NamedTuple):
    """A folder that has, or had, a checkpoint; the larger entry is the newer one.

    Where an update is saved again, that is another revision: the one before stays until the new one is published.
    """

    update: int
    revision: int
    path: Path


@final
class CheckpointFolder:
    """The checkpoints in one folder, which has at most one writer.

    Args:
        path: of the folder; only `lock` makes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unlock: weakref.finalize[[int], CheckpointFolder] | None = None
        self._whole: set[Path] = set()  # known to be: the others are read before the first one is given up

    def lock(self) -> None:
        """Make the folder and keep other writers out, until `unlock`, or the end of this process, whatever it is.

        Raises:
            OSError: when the folder cannot be made, or has another writer.
        """
        import fcntl  # not on Windows, where the package can at least be imported

        self.path.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except BlockingIOError:
            writer = os.read(file, 1000).decode(errors="replace").strip()
            os.close(file)
            raise OSError(
                f"a checkpoint folder must have one writer, but {self.path} is in use by {writer or 'another one'}; "
                f"close() that Checkpoint, or choose another folder"
            ) from None
        except BaseException:
            os.close(file)
            raise
        self._unlock = _held[file] = weakref.finalize(self, _release, file)
        _mind_forks()

    def unlock(self) -> None:
        """Let others write."""
        if self._unlock is not None:
            self._unlock()

    def entries(self) -> list[Entry]:
        """All that have the name of a checkpoint, the newest first, whether they are whole or not."""
        names = [(_NAME.fullmatch(path.name), path) for path in self.path.glob("update-*")]
        return sorted((Entry(int(m[1]), int(m[2] or 0), path) for m, path in names if m), reverse=True)

    def next_path(self, update: int) -> Path:
        """Where the next checkpoint of this update belongs.

        Raises:
            RuntimeError: when the folder is not locked.
        """
        if self._unlock is None or not self._unlock.alive:
            raise RuntimeError(
                f"a checkpoint folder must be locked by who writes into it, but this writer has let {self.path} go; "
                f"make another Checkpoint in the place of one that is closed"
            )
        revision = max((entry.revision + 1 for entry in self.entries() if entry.update == update), default=0)
        return self.path / (f"update-{update:08d}" + (f"-{revision}" if revision else ""))

    def publish(self, target: Path, facts: Mapping[str, Any], write: Callable[[IO[bytes]], None]) -> None:
        """Make a checkpoint of what `write` writes into the file that it is given.

        Args:
            target: the `next_path`.
            facts: for the manifest.
            write: writes the state.

        Raises:
            OSError: when it cannot be written; then there is no trace of it.
        """
        self._sweep()
        part = target.with_name(f".{target.name}.part")
        try:
            part.mkdir()
            with (part / STATE).open("wb") as file:
                hashed = _Hashed(file)
                write(hashed)  # type: ignore[arg-type]
                if hashed.failure is not None:
                    raise hashed.failure
                _to_disk(file)
            about = {"name": STATE, "bytes": hashed.bytes, "sha256": hashed.digest.hexdigest()}
            with (part / MANIFEST).open("w", encoding="utf-8", newline="\n") as manifest:
                manifest.write(_sealed({**facts, "file": about}))
                _to_disk(manifest)
            _names_to_disk(part)
            part.rename(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        _names_to_disk(self.path)
        self._whole.add(target)

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` whole ones, of each update its newest revision, and what is newer."""
        kept: set[int] = set()
        for update, _, path in self.entries():
            if update not in kept and len(kept) < keep:
                if self._known_whole(path):
                    kept.add(update)
            else:
                self._whole.discard(path)
                with suppress(OSError):  # what is left over goes another time
                    self._delete(path.rename(path.with_name(f".{path.name}.old")))

    def newest_after(self, update: int) -> Path | None:
        """A whole one of a later update."""
        later = [entry.path for entry in self.entries() if entry.update > update]
        return next(filter(self._known_whole, later), None)

    def _known_whole(self, path: Path) -> bool:
        if path not in self._whole and whole(path) is not None:
            self._whole.add(path)
        return path in self._whole

    def _sweep(self) -> None:
        """Delete what a writer that was killed has left."""
        for path in self.path.glob(".update-*"):
            self._delete(path)

    @staticmethod
    def _delete(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


@final
class _Hashed:
    """A file that is written once, from the beginning, and what came to it.

    It keeps its first failure to itself until it is asked: torch's writer takes one for a fault of its own.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest, self.bytes = hashlib.sha256(), 0
        self.failure: OSError | None = None

    def write(self, block: Any) -> int:
        self.digest.update(block)
        self.bytes += len(block)
        try:
            if self.failure is None:
                self._file.write(block)
        except OSError as error:
            self.failure = error
        return len(block)

    def flush(self) -> None:
        """Left to `_to_disk`."""


def _sealed(facts: Mapping[str, Any]) -> str:
    """As JSON, of which there is one text only for the same facts."""
    seal = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return json.dumps({**facts, "seal": seal}, indent=2, sort_keys=True) + "\n"


def _unsealed(text: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(text)
    unsealed = {key: value for key, value in facts.items() if key != "seal"}
    if _sealed(unsealed) != text:
        raise ValueError("the seal is broken")
    return unsealed


def _to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _names_to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _release(file: int) -> None:
    del _held[file]
    os.close(file)


@functools.cache
def _mind_forks() -> None:
    """A forked child, a loader's worker for one, shares the lock: it must neither keep it nor let it go."""

    def forget() -> None:
        for unlock in list(_held.values()):
            unlock()

    os.register_at_fork(after_in_child=forget)
