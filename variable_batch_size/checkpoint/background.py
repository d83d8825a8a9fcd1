"""One piece of work at a time that is done while the training goes on, and whose failure is not lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import final


@final
class Background:
    """A thread for each piece of work; the interpreter does not exit before it is done."""

    def __init__(self) -> None:
        self._pending: Future[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether all that was begun is finished."""
        return self._pending is None

    def begin(self, work: Callable[[], None]) -> None:
        """Let a thread do it; what was begun before has to be finished."""
        pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending = pool.submit(work)
        pool.shutdown(wait=False)  # the thread ends with its work, and not with this object

    def finish(self) -> None:
        """Wait for what was begun, if anything.

        Raises:
            Exception: what it failed with, once.
        """
        if self._pending is not None:
            wait([self._pending])  # interrupted here, it is as pending as before
            done, self._pending = self._pending, None
            done.result()
