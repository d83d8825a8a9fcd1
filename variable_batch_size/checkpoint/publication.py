"""Write a checkpoint by several ranks, without any of them waiting for the others.

Each rank writes its file and then reports to a store that all ranks share. The rank that reports last publishes the
checkpoint: before that it does not exist, so that a rank that is killed leaves the earlier ones. Nothing here is a
collective, because a thread writes while the training goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from variable_batch_size.checkpoint.folder import CheckpointFolder
from variable_batch_size.checkpoint.manifest import StateFile, file_name

_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 1.0


@final
class Save(NamedTuple):
    """What a rank knows of a checkpoint of which it writes a file.

    Attributes:
        number: of this save; the same on all ranks, and another one for every save.
        path: where it is published.
        ranks: those that write a file of it, rank 0 first.
        contents: the contents of this rank's file.
        facts: the further entries of the manifest; those of rank 0 count.
    """

    number: int
    path: Path
    ranks: Sequence[int]
    contents: Any
    facts: dict[str, Any]


@final
class Publisher:
    """Writes this rank's files of checkpoints, and publishes those that it is the last to finish.

    Args:
        folder: folder of the checkpoints, as this rank sees it.
        keep: number of checkpoints to keep, beside the best one.
        rank: this rank.
        store: store that all ranks share; None if rank 0 writes alone.
    """

    def __init__(self, folder: CheckpointFolder, keep: int, rank: int, store: dist.Store | None) -> None:
        self._folder, self._keep, self._rank = folder, keep, rank
        self._store = store and dist.PrefixStore("saves", store)

    def write(self, save: Save) -> None:
        """Write the file of this rank, and publish the checkpoint and delete those that exceed `keep`, if it is last.

        A background thread may call it: it reads nothing of the training but its argument.

        Raises:
            OSError: if the file or, on the last rank, the manifest cannot be written.
        """
        began, report = time.monotonic(), ""
        try:
            with named_errors(self._folder, save.path):
                file = self._folder.write(save.path, file_name(self._rank), partial(torch.save, save.contents))
            report = json.dumps([file, save.facts])
        finally:
            reports = self._report(save, report)
            if reports is not None:
                self._conclude(save, reports)
            elif report:
                self._linger(save, began)

    def _report(self, save: Save, report: str) -> list[str] | None:
        """Report that this rank has finished, and return the reports of all ranks if it is the last, otherwise None."""
        if len(save.ranks) == 1 or self._store is None:
            return [report]
        self._store.set(_key(save, self._rank), report)
        if self._store.add(_key(save, "reports"), 1) < len(save.ranks):
            return None
        return [self._store.get(_key(save, rank)).decode() for rank in save.ranks]

    def _conclude(self, save: Save, reports: list[str]) -> None:
        """Publish the checkpoint if all ranks have written their files, and otherwise delete these."""
        outcome = "abandoned"
        try:
            if all(reports):
                files = [StateFile(*json.loads(report)[0]) for report in reports]
                with named_errors(self._folder, save.path):
                    self._folder.publish(save.path, json.loads(reports[0])[1], files)
                outcome = "published"
            else:
                self._folder.abandon(save.path)
        finally:
            if len(save.ranks) > 1 and self._store is not None:
                self._store.set(_key(save, "outcome"), outcome)
                for name in ("reports", *save.ranks):
                    self._store.delete_key(_key(save, name))
        if outcome == "published":
            self._folder.prune(self._keep)

    def _linger(self, save: Save, began: float) -> None:
        """Wait for the last rank, because this process may end, and the store with it; and learn what it published.

        The files have about the same size: a rank that takes more than about twice as long has probably ended.
        """
        deadline = 2 * time.monotonic() - began + _PATIENCE_SECONDS
        while self._store is not None and time.monotonic() < deadline:
            if self._store.check([_key(save, "outcome")]):
                if self._store.get(_key(save, "outcome")) == b"published":
                    self._folder.trust(save.path)  # else this rank would read it before it deletes an older one
                return
            time.sleep(_POLL_SECONDS)


def _key(save: Save, name: object) -> str:
    return f"{save.number}/{name}"


@contextmanager
def named_errors(folder: CheckpointFolder, path: Path) -> Iterator[None]:
    """Name the checkpoint in an OSError, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"Checkpoint {path.name} could not be written to {folder.path} ({error.strerror}); free disk space or "
            f"choose another folder (earlier checkpoints are unchanged)"
        ) from error
