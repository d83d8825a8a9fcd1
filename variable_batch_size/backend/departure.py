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

LEFT, _EXITED = "left", "exited"  # keys: how many ranks have done so; and left/RANK, of each that has left
_SECONDS_AT_EXIT = 3.0


@final
class AskedOnce:
    """A store that is not asked again when its process has ended: at each try torch prints a stack of its own.

    Raises:
        DistNetworkError: then, in each method.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store, self._ended = store, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self._ended:
                raise dist.DistNetworkError("the process that holds the store has ended")
            try:
                return getattr(self._store, name)(*arguments)
            except dist.DistNetworkError:
                self._ended = True
                raise

        return call


_open_parties: WeakSet[Any] = WeakSet()  # agreements with another store than one in memory, which ends with all ranks
_last_joined: list[tuple[AskedOnce, World, int]] = []  # store, ranks and process of the last one


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
        if not _last_joined or _last_joined[0][2] != os.getpid():  # a fork has no finalizers of multiprocessing yet
            atexit.register(_leave_all)  # registered late, so that it runs before the handlers of imported modules
            Finalize(None, _leave_all, exitpriority=1)  # processes that multiprocessing forks skip atexit
        _last_joined[:] = [(store, world, os.getpid())]
        _open_parties.add(party)
    return leave


def _tell_leaving(store: AskedOnce, rank: int, pid: int) -> None:
    with suppress(RuntimeError):  # the process with the store has ended
        if os.getpid() == pid:  # and this is not a fork of it
            store.set(f"{LEFT}/{rank}", "")
            store.add(LEFT, 1)


def _leave_all() -> None:
    """Leave; rank 0, whose process holds the store as a rule, waits for a moment until the others exit, too."""
    ends = time.monotonic() + _SECONDS_AT_EXIT
    parties = list(_open_parties)
    for party in parties:
        party.leave()
    for store, world, pid in _last_joined:
        with suppress(RuntimeError):
            exited = store.add(_EXITED, int(os.getpid() == pid))
            while world.rank == 0 and os.getpid() == pid and exited < world.size and time.monotonic() < ends:
                time.sleep(0.01)
                exited = store.add(_EXITED, 0)
    for party in parties:
        party.drop_store()
    _open_parties.clear()
    _last_joined.clear()


def identity() -> str:
    """Return what identifies this process: machine, process id and start; "" on other systems."""
    try:
        return f"{_machine_identity()} {os.getpid()} {_state_and_start(os.getpid())[1]}"
    except OSError:
        return ""


def has_ended(process: str) -> bool:
    """Return whether the process with an `identity` has ended; False if it is on another machine."""
    try:
        machine, pid, start = process.rsplit(" ", 2)
        if machine != _machine_identity():
            return False
    except (OSError, ValueError):
        return False
    try:
        state, began = _state_and_start(int(pid))
    except OSError:
        return True
    return state in "ZX" or began != start  # it waits for its parent to take its exit code; or another one has its id


def _machine_identity() -> str:
    """Return the boot of the machine, and the namespace of its process ids."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the state of a process and when it began, as proc(5) has them; raise OSError without one."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from the third field of proc(5) on
    return fields[0], fields[19]
