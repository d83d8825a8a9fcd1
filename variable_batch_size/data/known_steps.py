"""Until where batch sizes are known, for the threads that read a sampler ahead of the training."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import final

_POLL_SECONDS = 0.5  # after which a reader looks whether the training has ended
WARN_SECONDS = 30.0  # of waiting


class AbandonedError(Exception):
    """Nobody reads what a waiting reader would read."""


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

        Raises:
            AbandonedError: if nobody does.
        """
        begun, warned = time.monotonic(), False
        with self._changed:
            while not known():
                if self._is_in_vain():
                    return False
                if abandoned():
                    raise AbandonedError
                self._changed.wait(_POLL_SECONDS)
                if not warned and time.monotonic() - begun > WARN_SECONDS:
                    warned = True
                    warnings.warn(
                        f"A loader has waited {WARN_SECONDS:.0f} seconds in {threading.current_thread().name} for a "
                        f"batch size that the training chooses; if the training waits for this thread, pass a larger "
                        f"delay to the AdaptiveTrace (num_workers * prefetch_factor + 4 is always enough)",
                        UserWarning,
                        stacklevel=2,
                    )
        return True

    def _is_in_vain(self) -> bool:
        unknown = self._trained_in is None and not threading.current_thread().daemon
        return unknown or threading.get_ident() == self._trained_in or not threading.main_thread().is_alive()
