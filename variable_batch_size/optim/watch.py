"""Looks for a rank that does not come, while the host waits where no Python runs."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import final
from weakref import finalize, ref

from variable_batch_size.backend import Backend

_SECONDS_TO_LOOK = 1.0


@final
class Watch:
    """A thread that looks every second, from `begin` to `end`."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self._waits = backend, threading.Event()
        self._thread: threading.Thread | None = None
        finalize(self, self._waits.set).atexit = False

    def begin(self) -> None:
        """Look for absent ranks from now on."""
        self._waits.set()
        if self._thread is None:
            self._thread = threading.Thread(target=_look, args=(ref(self), self._waits), daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Look for absent ranks no longer."""
        self._waits.clear()


def _look(watch: ref[Watch], waits: threading.Event) -> None:
    """Look every second while `waits` is set, as long as the watch lives."""
    while waits.wait():
        time.sleep(_SECONDS_TO_LOOK)
        if (alive := watch()) is None:
            return
        with suppress(RuntimeError):  # the sentence is in the store: the others end by it, and then this rank
            alive.backend.while_waiting(waits.is_set)
        del alive
