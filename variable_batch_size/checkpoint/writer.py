"""What rank 0 does in the folder of the checkpoints: it begins and marks them, and says what to resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

from variable_batch_size.checkpoint import notices
from variable_batch_size.checkpoint.best import Criterion
from variable_batch_size.checkpoint.folder import CheckpointFolder
from variable_batch_size.checkpoint.publication import named_errors

_POSITION = ("epoch", "step", "samples")
_FINGERPRINT = ("trace", "dataset_size", "seed", "shuffle", "drop_last")


@final
class Writer:
    """Rank 0's access to the folder of one training; other ranks do not use theirs.

    Args:
        folder: the folder.
        keep: number of checkpoints to keep, beside the best one.
        criterion: what makes a checkpoint the best one, if anything.
        updates: number of updates that the training has made.
    """

    def __init__(self, folder: CheckpointFolder, keep: int, criterion: Criterion | None, updates: int) -> None:
        self._folder, self._keep, self._criterion = folder, keep, criterion
        self._first_update = updates  # at the creation of this object, or after the last restore
        self._restored_best: Path | None = None  # until the next save, which deletes the newer checkpoints

    def lock(self) -> str:
        """Lock the folder against other writers, and return a token by which other ranks recognize it.

        Raises:
            OSError: if it cannot be written, or another writer has locked it.
        """
        try:
            return self._folder.lock()
        except OSError as error:
            if error.errno is None:  # the error names another writer, and is not the operating system's
                raise
            raise OSError(
                f"dir must be a writable folder, got {self._folder.path} ({error.strerror}); choose another folder"
            ) from error

    def begin(self, updates: int) -> Path:
        """Create the place where ranks write a checkpoint, and return the path at which it will be published.

        Args:
            updates: number of updates of the training.

        Raises:
            OSError: if it cannot be created.
            ValueError: if the folder has a checkpoint of a later update, from which the training does not come.
        """
        self._discard_newer()
        if later := self._folder.newest(after=updates):
            raise ValueError(
                f"Checkpoint {later.path} is ahead of this training, which has made {updates} updates; restore() it "
                f"first, or choose another folder"
            )
        path = self._folder.next_path(updates)
        with named_errors(self._folder, path):
            self._folder.begin(path)
        return path

    @staticmethod
    def facts(updates: int, parts: dict[str, Any], reported: dict[str, Any]) -> dict[str, Any]:
        """Return what the manifest holds of the training.

        Args:
            updates: number of updates of the training.
            parts: state dicts by name.
            reported: what the manifest holds of reported values.
        """
        position = parts["optimizer"]["vbs"]
        facts = {key: position[key] for key in (*_POSITION, *_FINGERPRINT)}
        return {**facts, "updates": updates, "parts": sorted(parts), **reported}

    def mark_best(self, updates: int, reported: dict[str, Any]) -> str:
        """Mark the checkpoint of this update as the best one, if it is and there is one.

        Args:
            updates: number of updates of the training.
            reported: what the manifest holds of reported values.

        Returns:
            "" if the values are not better than those of every intact checkpoint, "marked", or "save" if the folder has
            no checkpoint of this update.

        Raises:
            OSError: if the manifest cannot be written.
        """
        if self._criterion is None or not self._folder.is_better(reported, self._criterion):
            return ""
        self._discard_newer()
        newest = self._folder.newest(after=updates - 1)
        if newest is None or newest.update > updates:  # the save will raise in the second case
            return "save"
        with named_errors(self._folder, newest.path):
            self._folder.mark(newest, reported)
        self._folder.prune(self._keep)
        return "marked"

    def candidates(self, best: bool) -> list[Path]:
        """Return the checkpoints in the order in which a restore tries them."""
        return self._folder.candidates(best=best, criterion=self._criterion)

    def resume(self, path: Path, epoch: int, updates: int, samples: int, best: bool) -> None:
        """Continue from the checkpoint at `path`, and say so; after the best one, the next save deletes newer ones."""
        self._first_update, self._restored_best = updates, path if best else None
        newer = [newer.name for newer in self._folder.newer_than(path)] if best else []
        notices.say(notices.restored(path, epoch, samples, newer))

    def say_what_to_resume_from(self, updates: int) -> None:
        """Say after an exception which checkpoint to resume from, once and if there were updates."""
        best, newest = self._restored_best, self._folder.newest()
        lost = updates - (self._first_update if best else newest.update if newest else 0)
        if updates != self._first_update and lost >= 0:  # else the folder is that of another training
            path = best or (newest.path if newest else None)
            notices.say(notices.interrupted(self._folder.path, path, lost, best is not None))
        self._first_update = updates

    def _discard_newer(self) -> None:
        """Delete what is newer than the best checkpoint from which the training continues."""
        if self._restored_best is not None:
            self._folder.discard_after(self._restored_best)
            self._restored_best = None
