"""Until where batch sizes are known, for the threads that read a sampler ahead of the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

_POLL_SECONDS = 0.5  # after which a reader looks whether the training has ended


@final
class KnownSteps:
    """Lets a loader that reads in a thread of its own wait for batch sizes that are not chosen yet.

    A reader in the thread of the training cannot wait for it: it raises.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._trained_in = threading.get_ident()

    def __reduce__(self) -> tuple[type[KnownSteps], tuple[()]]:
        """A copy has no readers yet."""
        return KnownSteps, ()

    def notify(self) -> None:
        """Note that the training, in this thread, has learnt more."""
        with self._changed:
            self._trained_in = threading.get_ident()
            self._changed.notify_all()

    def wait_for(self, known: Callable[[], bool], abandoned: Callable[[], bool]) -> bool:
        """Return True when something is known, while another thread trains; False if waiting would be in vain.

        Args:
            known: function that returns whether it is known.
            abandoned: function that returns whether nobody reads what this reader would read.
        """
        with self._changed:
            while not known():
                if threading.get_ident() == self._trained_in or not threading.main_thread().is_alive() or abandoned():
                    return False
                self._changed.wait(_POLL_SECONDS)
        return True
