"""What rank 0 does in the folder of the checkpoints: it publishes and marks them, and says what to resume from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, final

from variable_batch_size.checkpoint import notices, stored_state
from variable_batch_size.checkpoint.agreement import Agreement
from variable_batch_size.checkpoint.best import Criterion
from variable_batch_size.checkpoint.folder import CheckpointFolder
from variable_batch_size.checkpoint.snapshot import Snapshot

_POSITION = ("epoch", "step", "samples")
_FINGERPRINT = ("trace", "dataset_size", "seed", "shuffle", "drop_last")


@final
class Writer:
    """Rank 0's access to the folder of one training; other ranks do not use theirs.

    Args:
        folder: the folder.
        keep: number of checkpoints to keep, beside the best one.
        criterion: what makes a checkpoint the best one, if anything.
        snapshot: brings states to the host.
        agreement: runs writes in a thread.
        updates: number of updates that the training has made.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        keep: int,
        criterion: Criterion | None,
        snapshot: Snapshot,
        agreement: Agreement,
        updates: int,
    ) -> None:
        self._folder, self._keep, self._criterion = folder, keep, criterion
        self._snapshot, self._agreement = snapshot, agreement
        self._first_update = updates  # at the creation of this object, or after the last restore
        self._restored_best: Path | None = None  # until the next save, which deletes the newer checkpoints

    def lock(self) -> str:
        """Lock the folder against other writers.

        Raises:
            OSError: if it cannot be written, or another writer has locked it.
        """
        try:
            self._folder.lock()
        except OSError as error:
            if error.errno is None:  # the error names another writer, and is not the operating system's
                raise
            raise OSError(
                f"dir must be a writable folder, got {self._folder.path} ({error.strerror}); choose another folder"
            ) from error
        return ""

    def publish(
        self, updates: int, parts: dict[str, Any], rng_states: list[str], wait: bool, reported: dict[str, Any]
    ) -> Path:
        """Publish a checkpoint and return its path; without `wait`, in a thread that uses only a copy of the state.

        Args:
            updates: number of updates of the training.
            parts: state dicts by name.
            rng_states: RNG states by rank.
            wait: whether to return only after it is published.
            reported: what its manifest holds of reported values.

        Raises:
            OSError: if it cannot be written.
            TypeError: if a state holds a value that a checkpoint cannot hold.
            ValueError: if the folder has a checkpoint of a later update, from which the training does not come.
        """
        self._discard_newer()
        if later := self._folder.newest(after=updates):
            raise ValueError(
                f"Checkpoint {later.path} is ahead of this training, which has made {updates} updates; restore() it "
                f"first, or choose another folder"
            )
        position, path = parts["optimizer"]["vbs"], self._folder.next_path(updates)
        facts = {key: position[key] for key in (*_POSITION, *_FINGERPRINT)}
        facts |= {"updates": updates, "parts": sorted(parts), **reported}
        on_host = self._snapshot.view(parts) if wait else self._snapshot.copy(parts)
        write = partial(stored_state.write, self._folder, self._keep, path, facts, on_host, rng_states)
        if wait:
            write()
        else:
            self._agreement.start_write(write)
        return path

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
        stored_state.mark(self._folder, self._keep, newest, reported)
        return "marked"

    def candidates(self, best: bool) -> list[Path]:
        """Return the checkpoints in the order in which a restore tries them."""
        return self._folder.ranked(self._criterion) if best else [entry.path for entry in self._folder.entries()]

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
