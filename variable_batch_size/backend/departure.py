"""What a rank leaves in the store when it ends, so that no other rank waits for it, and whether a process lives."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, final
from weakref import WeakSet, finalize

import torch.distributed as dist

from variable_batch_size.world import World

# Keys of the store: how many ranks have left, and are in their exit handlers. Each that has left also has a left/RANK.
LEFT, _EXITED = "left", "exited"
_SECONDS_AT_EXIT = 3.0  # that rank 0 waits for the others


@final
class AskedOnce:
    """A store whose methods raise DistNetworkError at once when its process was found to have ended.

    Otherwise torch would print a stack for each attempt to connect.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store, self._ended = store, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of the store that raises at once if the process of the store was found to have ended."""

        def call(*arguments: Any) -> Any:
            if self._ended:
                raise dist.DistNetworkError("the process that holds the store has ended")
            try:
                return getattr(self._store, name)(*arguments)
            except dist.DistNetworkError:
                self._ended = True
                raise

        return call


_open_parties: WeakSet[Any] = WeakSet()  # agreements of this process, but for those with a store in memory
_last_joined: list[tuple[AskedOnce, World, int]] = []  # of the last one: store, world, and id of this process


def register_leave(party: Any, world: World, store: AskedOnce, *, in_memory: bool) -> finalize[Any, Any]:
    """Return a function that tells the other ranks that this one has ended; it also runs when the process exits.

    Args:
        party: what takes part for this rank; the function also runs when it is garbage-collected.
        world: this rank, and the number of ranks.
        store: the store through which the ranks agree.
        in_memory: whether the store is in the memory of this process, so that no rank can outlive it.
    """
    leave = finalize(party, _tell_leaving, store, world.rank, os.getpid())  # a second call does nothing
    if not in_memory:
        is_first = not _last_joined or _last_joined[0][2] != os.getpid()  # of this process, which may be a fork
        if is_first:
            atexit.register(_leave_all)  # registered late, so that it runs before the handlers of imported modules
            Finalize(None, _leave_all, exitpriority=1)  # processes that multiprocessing forks skip atexit
        _last_joined[:] = [(store, world, os.getpid())]
        _open_parties.add(party)
    return leave


def _tell_leaving(store: AskedOnce, rank: int, pid: int) -> None:
    """Record in the store that a rank has left, so that no other rank waits for it.

    Args:
        store: the store of the ranks.
        rank: the rank.
        pid: id of its process; a fork of it records nothing.
    """
    with suppress(RuntimeError):  # the process with the store has ended
        if os.getpid() == pid:
            store.set(f"{LEFT}/{rank}", "")
            store.add(LEFT, 1)


def _leave_all() -> None:
    """Leave all agreements at the exit of this process; rank 0 waits at most 3 s until the others exit, too.

    Its process usually holds the store, which ends with it.
    """
    deadline = time.monotonic() + _SECONDS_AT_EXIT
    parties = list(_open_parties)
    for party in parties:
        party.leave()
    for store, world, pid in _last_joined:
        is_own = os.getpid() == pid  # in a fork, these are the agreements of the parent process
        with suppress(RuntimeError):
            exited = store.add(_EXITED, int(is_own))
            while world.rank == 0 and is_own and exited < world.size and time.monotonic() < deadline:
                time.sleep(0.01)
                exited = store.add(_EXITED, 0)  # adds nothing: it returns how many there are
    for party in parties:
        party.drop_store()
    _open_parties.clear()
    _last_joined.clear()


def identity() -> str:
    """Return a text that identifies this process: machine, process id and start time; "" where there is no /proc."""
    try:
        return f"{_machine_identity()} {os.getpid()} {_state_and_start(os.getpid())[1]}"
    except OSError:
        return ""


def has_ended(process: str) -> bool:
    """Return whether a process of this machine has ended; False if it is on another machine, or that is not known.

    Args:
        process: what `identity` has returned in that process.
    """
    try:
        machine, pid, saved_start = process.rsplit(" ", 2)
        if machine != _machine_identity():
            return False
    except (OSError, ValueError):
        return False
    try:
        state, start_now = _state_and_start(int(pid))
    except OSError:
        return True
    # Z, X: zombie, dead; with another start, another process has the id now.
    return state in "ZX" or start_now != saved_start


def _machine_identity() -> str:
    """Return the boot of the machine, and the namespace of its process ids."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the state of a process, such as "S" for sleeping, and when it began, in clock ticks since the boot.

    Raises:
        OSError: if there is no such process.
    """
    # The second field, the name in parentheses, may contain spaces: `fields` begin with the third one.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]  # fields 3 and 22 of proc(5)
