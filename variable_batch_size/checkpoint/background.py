"""Run one task at a time in a thread beside the training, and keep its error for the caller."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import final


@final
class Background:
    """One task at a time, each in a thread of its own; the interpreter does not exit before the task is done."""

    def __init__(self) -> None:
        self._pending: Future[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether no task is running or waits to be collected by `wait`."""
        return self._pending is None

    def start(self, task: Callable[[], None]) -> None:
        """Run `task` in a thread; call `wait` for the previous task first."""
        pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending = pool.submit(task)
        pool.shutdown(wait=False)  # the thread ends with its task, even if this object is deleted earlier

    def wait(self) -> None:
        """Wait for the current task, if there is one.

        Raises:
            Exception: the one that the task raised; it is raised once.
        """
        if self._pending is not None:
            wait([self._pending])  # an interrupt here leaves the task pending
            done, self._pending = self._pending, None
            done.result()
