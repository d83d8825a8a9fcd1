"""A folder of checkpoints: which there are, which is the best one, and which are deleted.

A checkpoint is a folder `update-00001234` with the files of the state and a manifest, whose checksums show later
damage. Where the folder is decides how one is published: see `disk.py` and `object_store.py`.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, final

from torch import Tensor

from variable_batch_size.checkpoint.best import Criterion
from variable_batch_size.checkpoint.lease import Lease
from variable_batch_size.checkpoint.manifest import DAMAGE, sealed_manifest, verified_manifest
from variable_batch_size.checkpoint.tensor_file import Extent, FileEntry

NAME = re.compile(r"update-([0-9]{8}|[1-9][0-9]{8,})(?:-([1-9][0-9]*))?")  # the name of each revision is unique


@final
class Entry(NamedTuple):
    """The name of a checkpoint, intact, damaged or of another program; a larger entry is newer.

    Each further save of the same update is another revision. The previous revision stays until the new one is
    published.
    """

    update: int
    revision: int
    path: Path


class CheckpointFolder(ABC):
    """The checkpoints in one folder, which has at most one writer."""

    def __init__(self, path: Path, run: str | None = None) -> None:
        self.path, self._lease = path, Lease(path, run)
        self._verified: set[Path] = set()  # `prune` verifies the others before it deletes an older one

    def trust(self, path: Path) -> None:
        """Record that the checkpoint at `path` is intact, so that it is not read to find out."""
        self._verified.add(path)

    def unlock(self) -> None:
        """Let other writers lock the folder."""
        self._lease.release()

    def renew(self) -> None:
        """Give a sign of life of the writer, after an update; see `Lease.renew`."""
        self._lease.renew()

    def is_shared(self, token: str) -> bool:
        """Return whether this process can write to the folder that was locked with this token.

        It may see another folder of this name, as on a disk of its own.
        """
        return self._lease.join(token)

    def entries(self) -> list[Entry]:
        """Return everything that has the name of a checkpoint, newest first; it is not verified."""
        names = [(NAME.fullmatch(path.name), path) for path in self._paths()]
        return sorted((Entry(int(m[1]), int(m[2] or 0), path) for m, path in names if m), reverse=True)

    def newer_than(self, path: Path) -> list[Path]:
        """Return the entries that are newer than the one at `path`, newest first; none if it is missing."""
        paths = [entry.path for entry in self.entries()]
        return paths[: paths.index(path)] if path in paths else []

    def prune(self, keep: int) -> None:
        """Keep the newest `keep` intact updates, each in its newest intact revision, and delete older entries.

        Of each criterion that was reported, the best intact checkpoint is kept, too. A damaged entry stays until `keep`
        newer updates, or a newer revision of the same update, are intact. One whose manifest is damaged always stays,
        because it may belong to another program.
        """
        kept: set[int] = set()
        manifests = self._manifests()
        criteria = filter(None, {Criterion.of(manifest) for _, manifest in manifests})
        best = {next(filter(self._is_intact, _ranked(criterion, manifests)), None) for criterion in criteria}
        for (update, _, path), _ in manifests:
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
        return _ranked(criterion, manifests) if criterion else []

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

    def _is_intact(self, path: Path) -> bool:
        if path not in self._verified and verified_manifest(path) is not None:
            self._verified.add(path)
        return path in self._verified

    # What depends on where the folder is. -----------------------------------------------------------------------------

    @abstractmethod
    def lock(self) -> str:
        """Create the folder and lock it against other writers, until `unlock`.

        Returns:
            A token, by which other ranks see whether their folder of this name is the same one.

        Raises:
            OSError: if the folder cannot be created or is itself a checkpoint, or another writer has locked it.
        """

    @abstractmethod
    def next_path(self, update: int) -> Path:
        """Return the path at which to publish the next checkpoint of `update`.

        Raises:
            RuntimeError: if this object has not locked the folder, or another writer has locked it since
                (LostLockError).
        """

    @abstractmethod
    def begin(self, target: Path) -> None:
        """Create the place where a checkpoint is written, before any rank writes.

        Args:
            target: the path that `next_path` returned.

        Raises:
            OSError: if it cannot be created.
        """

    @abstractmethod
    def write(self, target: Path, name: str, tensors: Mapping[str, Tensor]) -> tuple[FileEntry, dict[str, Extent]]:
        """Write a file of tensors of the checkpoint, and return what the manifest says of it.

        Args:
            target: path at which the checkpoint will be published.
            name: name of the file.
            tensors: in host memory.

        Raises:
            OSError: if the file cannot be written.
        """

    @abstractmethod
    def publish(self, target: Path, facts: Mapping[str, Any]) -> None:
        """Let a checkpoint be there; all of its files have been written.

        Args:
            target: path at which the checkpoint is published.
            facts: contents of the manifest.

        Raises:
            OSError: if the manifest cannot be written; nothing of the checkpoint remains.
        """

    @abstractmethod
    def abandon(self, target: Path) -> None:
        """Delete what has been written of a checkpoint."""

    @abstractmethod
    def mark(self, entry: Entry, facts: Mapping[str, Any]) -> None:
        """Add facts to the manifest of a checkpoint, which holds all of them or none at any instant.

        Raises:
            OSError: if the manifest cannot be written; the checkpoint is unchanged.
        """

    @abstractmethod
    def _paths(self) -> Iterable[Path]:
        """Return the paths of all checkpoints."""

    @abstractmethod
    def _discard(self, path: Path) -> None:
        """Delete a checkpoint, and nothing else."""


def _ranked(criterion: Criterion, manifests: Iterable[tuple[Entry, Mapping[str, Any]]]) -> list[Path]:
    ranks = [(criterion.rank(manifest) if manifest else -math.inf, entry) for entry, manifest in manifests]
    return [entry.path for rank, entry in sorted(ranks) if rank < math.inf]
