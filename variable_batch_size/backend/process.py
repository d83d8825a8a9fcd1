"""Whether another process of this machine has ended, also one that was killed (on Linux)."""

from __future__ import annotations

import os
from pathlib import Path


def identity() -> str:
    """Return what tells this process from all others: machine, process id and start; "" on other systems."""
    try:
        return f"{_machine()} {os.getpid()} {_state_and_start(os.getpid())[1]}"
    except OSError:
        return ""


def has_ended(process: str) -> bool:
    """Return whether the process with an `identity` has ended; False if it is on another machine."""
    try:
        machine, pid, start = process.rsplit(" ", 2)
        if machine != _machine():
            return False
    except (OSError, ValueError):
        return False
    try:
        state, began = _state_and_start(int(pid))
    except OSError:
        return True
    return state in "ZX" or began != start  # it waits for its parent to take its exit code; or another one has its id


def _machine() -> str:
    """Return the boot of the machine, and the namespace of its process ids."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _state_and_start(pid: int) -> tuple[str, str]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from the third field of proc(5) on
    return fields[0], fields[19]
