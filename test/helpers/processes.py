"""Processes of a test that begin with torch imported: they are forked from one that has done it, without threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.multiprocessing as mp

IMPORTED = ["pytest", "torch.distributed", "variable_batch_size.optim", "helpers.distributed_jobs"]
IMPORTED += ["torch.distributed.fsdp", "variable_batch_size.integrations.torchft"]  # the last one if it is installed
multiprocessing.set_forkserver_preload(IMPORTED)


def spawn(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Call `function(rank, *args)` in processes, as `torch.multiprocessing.spawn` does: it raises if one fails.

    The processes have the environment variables of the first call in this process.
    """
    mp.start_processes(_call, (function, args), nprocs, start_method="forkserver")


def _call(rank: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # after a fork its first call may be made by one thread only (caffe2's thread pool)
    function(rank, *args)


class Forked:
    """A process that calls `function(*arguments)`, with the methods of a Popen."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        self._process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit code."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)
