"""A process that dies between two operations on files, simulated in this process: nothing is cleaned up afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}  # audit events; fsync has none

_left: int | None = None  # operations until the death


class Died(BaseException):
    """Raised by the operation at which the process dies, and by all later ones."""


def _count(event: str, _: object) -> None:
    global _left
    if _left is not None and event in _OPERATIONS:
        if _left == 0:
            raise Died
        _left -= 1


@contextmanager
def dying_after(operations: int) -> Iterator[list[bool]]:
    """Let every operation on files fail after so many of them; the list that is yielded is [True] if one has failed.

    Threads that were started meanwhile have ended afterwards: those of a process that dies write nothing any more. The
    block waits for the one of a checkpoint.
    """
    global _left
    died: list[bool] = []
    earlier = set(threading.enumerate())
    _left = operations
    try:
        yield died
    except Died:
        died.append(True)
    finally:
        for thread in set(threading.enumerate()) - earlier:
            if not (thread.daemon or thread.name.startswith("checkpoint")):  # which end with the process
                thread.join()
        _left = None


sys.addaudithook(_count)
