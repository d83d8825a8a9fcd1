"""Until where batch sizes are known, for the threads that read a sampler ahead of the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

_POLL_SECONDS = 0.5  # after which a reader looks whether the training has ended


@final
class KnownSteps:
    """Lets a loader that reads in a thread of its own wait for batch sizes that are not chosen yet.

    The thread of the training cannot wait for itself. Before its first update nobody knows which one it is: only a
    thread that does not keep the process alive, as that of a loader, may wait then.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._trained_in: int | None = None

    def __reduce__(self) -> tuple[type[KnownSteps], tuple[()]]:
        """A copy has no readers yet."""
        return KnownSteps, ()

    def is_trained_here(self) -> None:
        """Note that this thread trains."""
        self._trained_in = threading.get_ident()

    def notify(self) -> None:
        """Note that more is known."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, known: Callable[[], bool], abandoned: Callable[[], bool]) -> bool:
        """Return True when something is known, while another thread trains; False if waiting would be in vain.

        Args:
            known: function that returns whether it is known.
            abandoned: function that returns whether nobody reads what this reader would read.
        """
        with self._changed:
            while not known():
                if self._is_in_vain() or abandoned():
                    return False
                self._changed.wait(_POLL_SECONDS)
        return True

    def _is_in_vain(self) -> bool:
        unknown = self._trained_in is None and not threading.current_thread().daemon
        return unknown or threading.get_ident() == self._trained_in or not threading.main_thread().is_alive()
