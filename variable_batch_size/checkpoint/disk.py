"""A folder of checkpoints on a POSIX file system: each one is published by a rename.

A checkpoint is a folder `update-00001234` with the files of the state and a manifest. It is written under a name that
begins with a dot, by one rank or several, flushed to disk and then renamed; a checkpoint is renamed to such a name
before it is deleted. A name without a dot therefore never belongs to an incomplete checkpoint.

Users keep other files in the same folder. What is deleted is therefore recognized as a checkpoint of this package: a
folder with nothing but these files in it, and with a sealed manifest or a name `.update-00001234.part` or `.old`.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import socket
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from torch import Tensor

from variable_batch_size.checkpoint import tensor_file
from variable_batch_size.checkpoint.folder import NAME, CheckpointFolder, Entry
from variable_batch_size.checkpoint.format import MANIFEST
from variable_batch_size.checkpoint.manifest import DAMAGE, flush_file, is_file_name, sealed_manifest, write_manifest
from variable_batch_size.checkpoint.tensor_file import Extent, FileEntry

LOCK = ".lock"
_NO_FLOCK = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)  # of file systems without it

_LEFTOVER = re.compile(rf"\.{NAME.pattern}\.(?:part|old)")
_unlock_by_file: dict[int, weakref.finalize[[int], DiskFolder]] = {}  # of the locked files, by descriptor


@final
class DiskFolder(CheckpointFolder):
    """The checkpoints in one folder of a disk.

    A locked file `.lock` tells others at once that the process which has locked it has ended. Where there is no
    `flock`, and of a process on another host, whose end a network file system may not notice, only the `Lease` counts.
    """

    def __init__(self, path: Path, run: str | None = None) -> None:
        super().__init__(path, run)
        self._unlock: weakref.finalize[[int], DiskFolder] | None = None

    def lock(self) -> str:
        """Lock the folder until `unlock` or any end of this process; see `CheckpointFolder.lock`."""
        if _is_checkpoint(self.path):
            raise OSError(
                f"dir must be the folder of a training, got the checkpoint {self.path}; pass the folder that it is in"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            return self._lease.acquire(flock=self._lock_file())
        except BaseException:
            self._unlock_file()
            raise

    def _lock_file(self) -> bool:
        """Lock the file `.lock`, and return whether it is; it is not if the file system or another host prevents it.

        Raises:
            OSError: if another process of this host has locked it.
        """
        import fcntl  # not on Windows, where the package can still be imported

        file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            holder = self._lease.holder()
            if isinstance(error, BlockingIOError) and (holder is None or holder.host == socket.gethostname()):
                raise OSError(
                    f"Checkpoint folder {self.path} is in use by {holder.process if holder else 'another writer'}; "
                    f"close() that Checkpoint, or choose another folder"
                ) from None
            if isinstance(error, BlockingIOError) or error.errno in _NO_FLOCK:
                return False
            raise
        self._unlock = _unlock_by_file[file] = weakref.finalize(self, _unlock_file, file)
        _reset_after_fork()
        return True

    def unlock(self) -> None:
        """Let other writers lock the folder."""
        self._unlock_file()
        super().unlock()

    def _unlock_file(self) -> None:
        if self._unlock is not None:
            self._unlock()

    def is_shared(self, token: str) -> bool:
        """Return whether this process can write to the folder that was locked with this token."""
        with suppress(*DAMAGE):
            return super().is_shared(token) and os.access(self.path, os.W_OK)
        return False

    def next_path(self, update: int) -> Path:
        """Return the path at which to publish the next checkpoint of `update`; see `CheckpointFolder.next_path`."""
        self._lease.check()
        revision = max((entry.revision + 1 for entry in self.entries() if entry.update == update), default=0)
        while True:
            path = self.path / (f"update-{update:08d}" + (f"-{revision}" if revision else ""))
            part = _part_of(path)
            if not os.path.lexists(part) or _is_leftover(part):
                return path
            revision += 1  # that name belongs to another program

    def begin(self, target: Path) -> None:
        """Create the folder in which a checkpoint is written; see `CheckpointFolder.begin`."""
        self._delete_leftovers()
        _part_of(target).mkdir()

    def write(self, target: Path, name: str, tensors: Mapping[str, Tensor]) -> tuple[FileEntry, dict[str, Extent]]:
        """Write a file of tensors, and flush it to disk; see `CheckpointFolder.write`."""
        with (_part_of(target) / name).open("xb", buffering=0) as file:
            written = tensor_file.write(file, name, tensors)
            flush_file(file)
        return written

    def publish(self, target: Path, facts: Mapping[str, Any]) -> None:
        """Rename a checkpoint to `target`; see `CheckpointFolder.publish`."""
        part = _part_of(target)
        try:
            write_manifest(part, facts)
            _flush_folder(part)
            self._lease.check()
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
        """Replace the manifest of a checkpoint by one with further facts; see `CheckpointFolder.mark`."""
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

    def _discard(self, path: Path) -> None:
        if _is_checkpoint(path):
            self._verified.discard(path)
            old = path.with_name(f".{path.name}.old")
            with suppress(OSError):  # the next save deletes what remains
                if not os.path.lexists(old):
                    _delete(path.rename(old))

    def _delete_leftovers(self) -> None:
        """Delete the incomplete and half-deleted checkpoints of writers that were killed."""
        for path in self.path.glob(".update-*"):
            if _is_leftover(path):
                _delete(path)

    def _paths(self) -> Iterable[Path]:
        return self.path.glob("update-*")


def _part_of(target: Path) -> Path:
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
