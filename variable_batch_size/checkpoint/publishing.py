"""Write a checkpoint by several ranks, without any of them waiting for the others; and what rank 0 does in the folder.

Each rank writes its file and then reports. The rank that reports last publishes the checkpoint: before that it does not
exist, so that a rank that is killed leaves the earlier ones. A thread writes while the training goes on. Other ranks
learn of its error when all of them ask, by a method that every rank calls.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, final

from torch import Tensor

from variable_batch_size._log import log
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.checkpoint import notices
from variable_batch_size.checkpoint.best import Criterion
from variable_batch_size.checkpoint.folder import CheckpointFolder
from variable_batch_size.checkpoint.manifest import file_name, is_on_disk, merged
from variable_batch_size.checkpoint.reading import StoredState
from variable_batch_size.checkpoint.shards import Part
from variable_batch_size.optim.optimizer import CustomOptimizer

_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 1.0


@final
class Save(NamedTuple):
    """What a rank knows of a checkpoint of which it writes a file.

    Attributes:
        number: of this save; the same on all ranks, and another one for every save.
        path: where it is published.
        ranks: those that write a file of it, rank 0 first.
        tensors: those that this rank writes, or its parts of them, by name.
        parts: where the parts belong, by name.
        described: dtype, shape and stride of all tensors, by name; those of rank 0 count.
        facts: the further entries of the manifest; those of rank 0 count.
    """

    number: int
    path: Path
    ranks: Sequence[int]
    tensors: dict[str, Tensor]
    parts: dict[str, Part]
    described: dict[str, Any]
    facts: dict[str, Any]


@final
class Publisher:
    """Writes this rank's files of checkpoints, one at a time, and publishes those that it is the last to finish.

    Args:
        folder: folder of the checkpoints, as this rank sees it.
        keep: number of checkpoints to keep, beside the best one.
        agreement: takes the reports, and tells the ranks of errors.
        name: of the checkpoints of this object, the same on all ranks.
    """

    def __init__(self, folder: CheckpointFolder, keep: int, agreement: Agreement, name: str) -> None:
        self._folder, self._keep, self._agreement, self._name = folder, keep, agreement, name
        self._pending: Future[str] | None = None
        self._unreported = False  # whether ranks have started to write, and not all of them know the outcome

    @property
    def idle(self) -> bool:
        """Whether this rank has no write that is in progress or waits to be collected by `wait`."""
        return self._pending is None

    def start(self, save: Save) -> None:
        """Write in a thread, if this rank has a file to write; call it on every rank, and `wait` before.

        The interpreter does not exit before the thread is done.
        """
        self._unreported = True
        if self._agreement.world.rank in save.ranks:
            pool = ThreadPoolExecutor(1, "checkpoint")
            self._pending = pool.submit(self.write, save)
            pool.shutdown(wait=False)  # the thread ends with its task, even if this object is deleted earlier

    def wait(self) -> str:
        """Wait for the write of this rank, if there is one; pass it to `Agreement.run_on_all`.

        Raises:
            Exception: the one that the write raised; it is raised once.
        """
        self._unreported = False
        if self._pending is not None:
            wait([self._pending])  # an interrupt here leaves it pending
            done, self._pending = self._pending, None
            done.result()
        return ""

    def raise_error(self, what: str) -> None:
        """Wait for the writes of all ranks, if there are any, and raise an error of one of them on every rank.

        Args:
            what: the call in which all ranks do so.
        """
        if self._unreported:
            self._agreement.run_on_all(what, self.wait)

    def warn_of_error(self) -> None:
        """Wait for the write of this rank without other ranks, and warn of its error: another exception propagates."""
        try:
            self.wait()
        except Exception as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=4)  # at the user's close() or `with`

    def write(self, save: Save) -> str:
        """Write the file of this rank, if it has one; if it is last, publish the checkpoint, and keep `keep` of them.

        A thread may call it: it reads nothing of the training but its argument. `Agreement.run_on_all` may, too.

        Raises:
            OSError: if the file or, on the last rank, the manifest cannot be written.
        """
        if self._agreement.world.rank not in save.ranks:
            return ""
        began, report = time.monotonic(), ""
        try:
            with named_errors(self._folder, save.path.name):
                entry, chunks = self._write(save)
            decides = self._agreement.world.rank == save.ranks[0]
            report = json.dumps([entry, chunks, *((save.described, save.facts) if decides else ())])
        finally:
            reports = self._agreement.report(f"{self._name}/{save.number}", report, save.ranks)
            if reports is not None:
                self._conclude(save, reports)
            elif report:
                self._linger(save, began)
        return ""

    def _write(self, save: Save) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the file of this rank, and return what the manifest says of it and of the tensors in it."""
        if not save.tensors:
            return {}, {}
        entry, extents = self._folder.write(save.path, file_name(self._agreement.world.rank), save.tensors)
        parts = {name: part._asdict() for name, part in save.parts.items()}
        return entry._asdict(), {name: {**extent._asdict(), **parts.get(name, {})} for name, extent in extents.items()}

    def _conclude(self, save: Save, reports: list[str]) -> None:
        """Publish the checkpoint if all ranks have written their files, and otherwise delete these."""
        outcome = "abandoned"
        try:
            if all(reports):
                found = [json.loads(report) for report in reports]
                described, facts = found[0][2:]
                with named_errors(self._folder, save.path.name):
                    self._folder.publish(save.path, {**facts, **merged([one[:2] for one in found], described)})
                outcome = "published"
            else:
                self._folder.abandon(save.path)
        finally:
            if len(save.ranks) > 1:
                self._agreement.publish(f"{self._name}/outcome", save.number, outcome)
        if outcome == "published":
            self._folder.prune(self._keep)

    def _linger(self, save: Save, began: float) -> None:
        """Wait for the last rank, because this process may hold the store, and end; and learn what it published.

        The files have about the same size: a rank that takes more than about twice as long has probably ended.
        """
        deadline = 2 * time.monotonic() - began + _PATIENCE_SECONDS
        while (outcome := self._agreement.poll(f"{self._name}/outcome", save.number)) is None:
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_SECONDS)
        if outcome == "published":
            self._folder.trust(save.path)  # else this rank would read it before it deletes an older one


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
        self.path, self._folder, self._keep, self._criterion = folder.path, folder, keep, criterion
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
                f"dir must be a writable folder, got {self._folder.path} ({error.strerror or error}); choose another "
                f"folder"
            ) from error

    def begin(self, updates: int) -> Path:
        """Create the place where ranks write a checkpoint, and return the path at which it will be published.

        Args:
            updates: number of updates of the training.

        Raises:
            OSError: if it cannot be created.
            ValueError: if the folder has a checkpoint of a later update, from which the training does not come.
        """
        with named_errors(self._folder, f"update-{updates:08d}"):
            self._discard_newer()
            if later := self._folder.newest(after=updates):
                raise ValueError(
                    f"Checkpoint {later.path} is ahead of this training, which has made {updates} updates; restore() "
                    f"it first, or choose another folder"
                )
            path = self._folder.next_path(updates)
            self._folder.begin(path)
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
        with named_errors(self._folder, f"update-{updates:08d}"):
            if self._criterion is None or not self._folder.is_better(reported, self._criterion):
                return ""
            self._discard_newer()
            newest = self._folder.newest(after=updates - 1)
            if newest is None or newest.update > updates:  # the save will raise in the second case
                return "save"
            self._folder.mark(newest, reported)
            self._folder.prune(self._keep)
            return "marked"

    def candidates(self, best: bool) -> list[Path]:
        """Return the checkpoints in the order in which a restore tries them."""
        return self._folder.candidates(best=best, criterion=self._criterion)

    def resume(
        self, stored: StoredState, optimizer: CustomOptimizer, sizes: tuple[int, int], lost: str, best: bool
    ) -> None:
        """Continue from a checkpoint, and say so; after the best one, the next save deletes newer ones.

        Args:
            stored: the checkpoint.
            optimizer: has been restored.
            sizes: batch size of the last update, and of the next one.
            lost: number of updates that were made and are not in it, in words.
            best: whether it was restored as the best one.
        """
        path, updates = stored.path, optimizer.updates
        self._first_update, self._restored_best = updates, path if best else None
        newer = [newer.name for newer in self._folder.newer_than(path)] if best else []
        worlds = stored.world, optimizer.agreement.world.size
        position = updates, optimizer.epoch, optimizer.samples
        log(notices.restored(path, worlds, sizes, position, lost, newer), rank=0, update=updates)

    def say_what_to_resume_from(self, updates: int) -> None:
        """Say after an exception which checkpoint to resume from, once and if there were updates."""
        best = self._restored_best
        try:
            newest = self._folder.newest()
        except Exception:  # a store that cannot be reached has another one; that of the training propagates
            return
        lost = updates - (self._first_update if best else newest.update if newest else 0)
        if updates != self._first_update and lost >= 0:  # else the folder is that of another training
            path = best or (newest.path if newest else None)
            message = notices.interrupted(self._folder.path, path, lost, best is not None)
            log(message, level=logging.WARNING if lost else logging.INFO, rank=0, update=updates)
        self._first_update = updates

    def _discard_newer(self) -> None:
        """Delete what is newer than the best checkpoint from which the training continues."""
        if self._restored_best is not None:
            self._folder.discard_after(self._restored_best)
            self._restored_best = None


@contextmanager
def named_errors(folder: CheckpointFolder, name: str) -> Iterator[None]:
    """Name the checkpoint in an error of a disk or a store, and what to do."""
    try:
        yield
    except (ValueError, RuntimeError):  # of this package
        raise
    except Exception as error:  # which class it has depends on the store
        remedy = "free disk space" if is_on_disk(folder.path) else "restore the connection"
        raise OSError(
            f"Checkpoint {name} could not be written to {folder.path} ({getattr(error, 'strerror', None) or error}); "
            f"{remedy} or choose another folder (earlier checkpoints are unchanged)"
        ) from error
