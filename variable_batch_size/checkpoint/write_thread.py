"""A thread that writes while the training continues, and that no interrupt of the training can stop or lose.

The training's side uses no `threading.Thread`, `Future` or `Condition`: a signal between two lines of Python inside
them leaves a lock that nothing releases, and the thread waits for it for ever. Functions of C, as used here, are
interrupted before or after, never within.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import final

from variable_batch_size._log import log, stacklevel_of_user

_LONGEST_PAUSE = 5e-3  # seconds between two looks whether a write has ended


@final
class WriteThread:
    """One thread that runs functions in the order of `submit`, with a `wait` that can be interrupted at any instant.

    The process does not end before they have run, also after the object is dropped. An error that `wait` has not raised
    is then a RuntimeWarning.
    """

    def __init__(self) -> None:
        """Begin without a thread; the first `submit` starts it."""
        self._work = _Work()
        weakref.finalize(self, self._work.wake.put, False).atexit = False  # it ends the thread

    @property
    def busy(self) -> bool:
        """Whether a function has not run yet."""
        return bool(self._work.functions)

    def submit(self, function: Callable[[], object]) -> None:
        """Let the thread run `function`; an interrupt can prevent it. At the end of the process it runs at once."""
        if _process_ends:  # nothing would wait for the thread
            function()
            return
        _working.add(self._work)
        if not self._work.is_taken.locked():
            _thread.start_new_thread(self._work.run, ())
        self._work.functions.append(function)
        self._work.wake.put(True)

    def wait(self) -> str:
        """Wait until all submitted functions have run, and return "", as `Agreement.run_on_all` needs.

        Raises:
            Exception: the error of one of the functions; it is raised once.
        """
        self._work.wait()
        if self._work.errors:
            try:
                raise self._work.errors[0]
            finally:
                self._work.errors.pop(0)
        return ""

    def warn(self) -> None:
        """Wait until all functions have run, and warn of an error instead of raising it.

        It is called on a single rank, while another exception propagates.
        """
        try:
            self.wait()
        except Exception as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=stacklevel_of_user())


@final
class _Work:
    """What a `WriteThread` and its thread share.

    Attributes:
        functions: those that have not run; the first one is under way.
        wake: True after a new function, False to end the thread.
        errors: those that were not raised.
        is_taken: locked by the thread.
    """

    def __init__(self) -> None:
        self.functions, self.wake = deque[Callable[[], object]](), SimpleQueue[bool]()
        self.errors, self.is_taken = list[BaseException](), _thread.allocate_lock()
        self._pid = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """Whether the thread is of this process, and not of the one that was forked."""
        return self._pid == os.getpid()

    def run(self) -> None:
        """Run the functions, in the thread."""
        if not self.is_taken.acquire(blocking=False):
            return  # a `submit` that was interrupted, or came before this line, has started a thread, too
        ends = False
        while not ends:
            ends = not self.wake.get()
            while self.functions:  # also at the end: else `_wait_at_end_of_process` would wait for ever
                try:
                    self.functions[0]()
                except BaseException as error:
                    self.errors.append(error)
                self.functions.popleft()
        if not self.errors:
            _working.discard(self)

    def wait(self) -> None:
        """Wait until all functions have run."""
        if not self.is_of_this_process:
            return
        pause = 1e-4  # seconds
        if self.functions:
            self.wake.put(True)  # a `submit` may have been interrupted before it has
        while self.functions:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


_working = set[_Work]()  # of all threads
_process_ends = False


def wait_for_all() -> str:
    """Wait until the functions of all threads of this process have run, and return "".

    Their errors stay where they are. Who takes over a folder, as a notebook's cell that runs again, then finds what was
    still being written there.
    """
    for work in tuple(_working):
        work.wait()
    return ""


def _wait_at_end_of_process() -> None:
    """Wait for the functions of all threads, also after a first Ctrl-C, then warn of their errors."""
    global _process_ends
    try:
        _process_ends = True
        wait_for_all()
    except KeyboardInterrupt:
        log("The last checkpoint is still being written; press Ctrl-C again to exit without it.", level=logging.WARNING)
        wait_for_all()
    for error in [error for work in tuple(_working) if work.is_of_this_process for error in work.errors]:
        try:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # where warnings are errors: the others are told, too
            traceback.print_exc()


# Private, and what `concurrent.futures` uses. `atexit` is too late: a script's own functions there may read the folder,
# and a process of `multiprocessing` that was forked calls none.
threading._register_atexit(_wait_at_end_of_process)  # type: ignore[attr-defined]
