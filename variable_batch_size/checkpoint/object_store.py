"""A folder of checkpoints in an object store, such as `s3://bucket/runs/a`, by fsspec.

A store has neither renames nor locks that end with a process. The files of a checkpoint are written first and its
manifest last: without it, it is not there, and it is deleted first. The lock is a `Lease`. With the number of the
writer, 3, checkpoints are called `update-00000812-3000`, `-3001` and so on. What an earlier writer still publishes,
after a later one has locked the folder, is ignored, because the later one has listed what there was.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast, final

from torch import Tensor

from variable_batch_size._extras import import_extra
from variable_batch_size.checkpoint import format, tensor_file
from variable_batch_size.checkpoint.disk import DiskFolder
from variable_batch_size.checkpoint.folder import NAME, CheckpointFolder, Entry
from variable_batch_size.checkpoint.format import MANIFEST
from variable_batch_size.checkpoint.lease import put, remove
from variable_batch_size.checkpoint.manifest import DAMAGE, is_file_name, is_on_disk, sealed_manifest
from variable_batch_size.checkpoint.tensor_file import Extent, FileEntry

_REVISIONS = 1000  # of one update, by one writer


@final
class StoreFolder(CheckpointFolder):
    """The checkpoints in one folder of an object store."""

    def __init__(self, path: Path, run: str | None = None) -> None:
        super().__init__(path, run)
        self._revision = 0  # of the next checkpoint of this writer

    def lock(self) -> str:
        """Lock the folder against other writers by a `Lease`; see `CheckpointFolder.lock`."""
        if (self.path / MANIFEST).exists():
            raise OSError(
                f"dir must be the folder of a training, got the checkpoint {self.path}; pass the folder that it is in"
            )
        return self._lease.acquire([entry.path.name for entry in self.entries()])

    def next_path(self, update: int) -> Path:
        """Return the path at which to publish the next checkpoint of `update`; see `CheckpointFolder.next_path`."""
        number = self._lease.check()
        revision = number * _REVISIONS + self._revision % _REVISIONS
        self._revision += 1  # never the name of an earlier one, which a slow rank may still write
        return self.path / f"update-{update:08d}-{revision}"

    def begin(self, target: Path) -> None:
        """Delete what writers that were killed have left: files without a manifest."""
        for name, files in self._listed().items():
            if NAME.fullmatch(name) and MANIFEST not in files:
                _delete(self.path / name)

    def write(self, target: Path, name: str, tensors: Mapping[str, Tensor]) -> tuple[FileEntry, dict[str, Extent]]:
        """Write a file of tensors of the checkpoint; see `CheckpointFolder.write`."""
        file: Any = (target / name).open("wb")
        try:
            written = tensor_file.write(file, name, tensors)
        except BaseException:
            with suppress(Exception):
                file.discard()
            raise
        file.close()  # which completes it
        return written

    def publish(self, target: Path, facts: Mapping[str, Any]) -> None:
        """Write the manifest, if no other writer has locked the folder; see `CheckpointFolder.publish`."""
        try:
            self._lease.check()
            put(target / MANIFEST, format.dumps(facts), create=True)
            self._lease.check()  # one that locked the folder meanwhile ignores this checkpoint, and never deletes it
        except BaseException:
            self.abandon(target)
            raise
        self.trust(target)

    def abandon(self, target: Path) -> None:
        """Delete what has been written of a checkpoint."""
        with suppress(*DAMAGE):
            _delete(target)

    def mark(self, entry: Entry, facts: Mapping[str, Any]) -> None:
        """Replace the manifest of a checkpoint by one with further facts; see `CheckpointFolder.mark`."""
        manifest = sealed_manifest(entry.path)
        del manifest["seal"]
        self._lease.check()
        put(entry.path / MANIFEST, format.dumps({**manifest, **facts}))

    def _paths(self) -> Iterable[Path]:
        """Return the paths of all checkpoints, without those of writers that had lost their lock."""
        listed = self._listed()
        names, holder = [name for name, files in listed.items() if MANIFEST in files], self._lease.holder(listed)
        if holder is not None:
            late = range(1, holder.number)
            names = [name for name in names if name in holder.known or _writer_of(name) not in late]
        return [self.path / name for name in names]

    def _discard(self, path: Path) -> None:
        with suppress(*DAMAGE):
            if sealed_manifest(path):
                self._verified.discard(path)
                _delete(path)

    def _listed(self) -> dict[str, set[str]]:
        """Return the names in the folder, with those of the files in folders; it is one request."""
        base: Any = self.path
        found: dict[str, set[str]] = {}
        for path in base.fs.find(base.path):
            name, _, file = path.removeprefix(base.path.rstrip("/") + "/").partition("/")
            found.setdefault(name, set()).add(file)
        return found


def _delete(path: Path) -> None:
    """Delete the files of a checkpoint, its manifest first."""
    names = [MANIFEST, *(file.name for file in path.iterdir() if file.name != MANIFEST and is_file_name(file.name))]
    for name in names:
        remove(path / name)


def _writer_of(name: str) -> int:
    """Return the number of the writer that has published a checkpoint; 0 if it was copied from a disk."""
    match = NAME.fullmatch(name)
    return int(match[2] or 0) // _REVISIONS if match else 0


def path_of(location: str | os.PathLike[str]) -> Path:
    """Return a location as a path: of a URL, as "s3://bucket/runs/a", one with the same methods.

    Raises:
        ModuleNotFoundError: if it is a URL, and the libraries of the extra `cloud` are not installed.
    """
    if "://" not in str(location):
        return Path(location)
    universal = import_extra("upath", "cloud")
    return cast("Path", universal.UPath(location, use_listings_cache=False))  # others write there, too


def folder_at(location: str | os.PathLike[str], run: str | None = None) -> CheckpointFolder:
    """Return the checkpoints at a location."""
    path = path_of(location)
    return DiskFolder(path, run) if is_on_disk(path) else StoreFolder(path, run)
