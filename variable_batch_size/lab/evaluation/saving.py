"""The checkpoints of a training, whose folder is created when the first one is due: short trainings end before."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, final

from variable_batch_size.checkpoint import Checkpoint


@final
class Saving:
    """The checkpoints of a training in a folder, which is locked from the first one on.

    Until then another process may train the same cell; the second one to save raises an error.

    Args:
        folder: their folder; None: nothing is saved.
        every: interval: time, or a number of updates.
        parts: what is saved, see `Checkpoint`.
    """

    def __init__(self, folder: Path | None, every: timedelta | int, parts: Mapping[str, Any]) -> None:
        self._folder, self._every, self._parts = folder, every, parts
        self._begin = time.monotonic()
        self._checkpoint: Checkpoint | None = None

    def restore(self) -> None:
        """Restore the newest checkpoint, if there is one."""
        if self._folder is not None and next(self._folder.glob("update-*"), None) is not None:
            self._create(self._folder).restore()

    def step(self, updates: int) -> None:
        """Save if a save is due; call it after each update."""
        if self._checkpoint is not None:
            self._checkpoint.step()
        elif self._folder is not None and self._is_due(updates):
            self._create(self._folder).save(wait=False)

    def _create(self, folder: Path) -> Checkpoint:
        self._checkpoint = Checkpoint(folder, keep=1, every=self._every, **self._parts)
        return self._checkpoint

    def _is_due(self, updates: int) -> bool:
        if isinstance(self._every, timedelta):
            return time.monotonic() - self._begin >= self._every.total_seconds()
        return updates % self._every == 0

    def __enter__(self) -> Saving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._checkpoint is not None:
            self._checkpoint.__exit__(kind, error, traceback)
