"""Work in a thread, for which a main thread waits that may be interrupted at any instant.

An interrupt in a wait for a lock of Python, and so for a `Future`, an `Event` or a `Thread`, may leave that lock held,
so that the thread or the next wait never ends. A byte in a socket, which nobody takes out, has no such instant.
"""

from __future__ import annotations

import _thread
import atexit
import os
import socket
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import final


@final
class Background:
    """Work that is done once: in a thread, or by the first that waits for it if the thread has not begun.

    At the end of the process it is waited for; an error that nobody has heard of is then a RuntimeWarning.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._works = [work]
        self._error: BaseException | None = None
        self._reader, self._writer = socket.socketpair()
        self._pid = os.getpid()
        atexit.register(self._wait_at_exit)

    def begin(self) -> None:
        """Start the thread."""
        _thread.start_new_thread(self._run, ())

    def wait(self) -> BaseException | None:
        """Return the error of the work, or None, when it is done; call it again after an interrupt."""
        self._run()
        if self._reader.fileno() >= 0:
            self._reader.recv(1, socket.MSG_PEEK)
            self._reader.close()
        atexit.unregister(self._wait_at_exit)
        return self._error

    def _run(self) -> None:
        """Do the work, unless another thread has begun it; then let those that wait go on."""
        with suppress(IndexError):
            work = self._works.pop()  # which one thread can do
            try:
                work()
            except BaseException as error:
                self._error = error
            finally:
                self._writer.send(b"\0")
                self._writer.close()

    def _wait_at_exit(self) -> None:
        if self._pid == os.getpid() and (error := self.wait()) is not None:  # a forked process has no such thread
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
