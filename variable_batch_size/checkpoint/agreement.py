"""What the ranks of a world tell one another, so that all of them return the same or raise the same error.

A rank writes in a thread. Other ranks learn whether the write succeeded only when all of them ask, by a method that
every rank calls: `wait_for_write` within `on_every_rank`, or `raise_write_error`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import final

from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint.background import Background


@final
class Agreement:
    """Calls that end in the same way on every rank, and the outcome of the writes of their threads.

    Every rank has to make the same calls in the same order, except those that say otherwise.

    Args:
        backend: exchanges the messages of the ranks.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self._background = backend, Background()
        self._write_unreported = False  # whether ranks have started a write whose outcome not all of them know

    def on_every_rank(self, work: Callable[[], bytes]) -> list[bytes]:
        """Return the results of `work` by rank.

        Raises:
            RuntimeError: on every rank, with the same text, if `work` failed on one of them.
        """
        failure = None
        try:
            message = b"+" + work()
        except Exception as error:
            failure, message = error, b"-" + str(error).encode()
        messages = self._backend.all_gather_bytes(message)
        for message in messages:
            if not message.startswith(b"+"):
                raise RuntimeError(message[1:].decode()) from failure
        return [message[1:] for message in messages]

    def on_rank_0(self, work: Callable[[], str]) -> str:
        """Call `work` on rank 0, and return its result on every rank; raise as `on_every_rank` does."""
        rank = self._backend.world.rank
        return self.on_every_rank(lambda: b"" if rank else work().encode())[0].decode()

    def any_rank(self, condition: Callable[[], bool]) -> bool:
        """Return whether the condition is true on any rank; raise as `on_every_rank` does."""
        return any(self.on_every_rank(lambda: b"yes" * condition()))

    # Writes in a thread. -----------------------------------------------------------------------------------------

    @property
    def writing(self) -> bool:
        """Whether this rank has a write for which `wait_for_write` has not waited; other ranks are not asked."""
        return not self._background.idle

    def start_write(self, task: Callable[[], None] | None) -> None:
        """Start the write of this rank in a thread; call it on every rank, with None if it writes nothing."""
        self._write_unreported = True
        if task is not None:
            self._background.start(task)

    def wait_for_write(self) -> bytes:
        """Wait for the write of this rank, and raise its error; pass it to `on_every_rank`."""
        self._write_unreported = False
        self._background.wait()
        return b""

    def raise_write_error(self) -> None:
        """Wait for the writes of all ranks, if there are any, and raise an error of one of them on every rank."""
        if self._write_unreported:
            self.on_every_rank(self.wait_for_write)

    def warn_of_write_error(self) -> None:
        """Wait for the write of this rank without other ranks, and warn of its error: another exception propagates."""
        try:
            self.wait_for_write()
        except Exception as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=4)  # at the user's close() or `with`
