"""The ranks of a test: threads, processes or XLA cores.

Processes begin with torch imported: they are forked from one that has done it, without threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from variable_batch_size.backend import DistributedBackend, XlaBackend
from variable_batch_size.testing import launch, run_ranks

Result = TypeVar("Result")
Where: TypeAlias = Literal["threads", "gloo", "cores"]
Job: TypeAlias = Callable[..., Result]  # of the backend of a rank, and further arguments

IMPORTED = ["pytest", "torch.distributed", "variable_batch_size.optim", "helpers.features"]
IMPORTED += ["torch.distributed.fsdp", "variable_batch_size.integrations.torchft"]  # the last one if it is installed
multiprocessing.set_forkserver_preload(IMPORTED)


def run_job(where: Where, job: Job[Result], *arguments: Any, ranks: int, folder: Path | None = None) -> list[Result]:
    """Call `job(backend, *arguments)` on each rank of a world, and return the results by rank.

    Ranks are threads of this process, processes of a gloo group, or cores of XLA:CPU; unless they are threads, the job
    is at the top level of a module, and its arguments and results can be pickled. Each process leaves what it has
    written to standard error in `folder / f"stderr{rank}"`, which is printed if a process fails.
    """
    if where == "threads":
        return run_ranks(lambda backend: job(backend, *arguments), ranks)
    with tempfile.TemporaryDirectory() as temporary:
        results, errors = Path(temporary), folder or Path(temporary)
        try:
            if where == "cores":
                launch(_on_core, (results, job, arguments), cores=ranks)
            else:
                store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun has it
                spawn(_in_group, (store.port, ranks, results, errors, job, arguments), ranks)
        except BaseException:
            for path in sorted(errors.glob("stderr*")):
                print(f"{path.name}:\n{path.read_text(errors='replace')}", file=sys.stderr)
            raise
        return [torch.load(results / f"result{rank}", weights_only=False) for rank in range(ranks)]


def _on_core(results: Path, job: Job[Any], arguments: tuple[Any, ...]) -> None:
    backend = XlaBackend()
    torch.save(job(backend, *arguments), results / f"result{backend.world.rank}")


def _in_group(
    rank: int, port: int, ranks: int, results: Path, errors: Path, job: Job[Any], arguments: tuple[Any, ...]
) -> None:
    os.dup2(os.open(errors / f"stderr{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        torch.save(job(DistributedBackend(), *arguments), results / f"result{rank}")
    finally:
        dist.destroy_process_group()


def spawn(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Call `function(rank, *args)` in processes, as `torch.multiprocessing.spawn` does: it raises if one fails.

    The processes have the environment variables of the first call in this process.
    """
    mp.start_processes(_call, (_used(), function, args), nprocs, start_method="forkserver")


def _call(rank: int, used: Path, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # after a fork its first call may be made by one thread only (caffe2's thread pool)
    _measure(used, function, (rank, *args))


def _used() -> Path:
    return Path(get_temp_dir()) / "used"  # which ends with this process


def _measure(used: Path, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """Call a function in a forked process, whose parent is the server of forks, and note the processors' seconds."""
    try:
        function(*arguments)
    finally:
        with suppress(FileNotFoundError), used.open("a") as file:  # the test may have ended
            file.write(f"{sum(os.times()[:4])}\n")


def seconds_of_forked() -> float:
    """Return the processors' seconds of all forked processes that have returned."""
    return sum(map(float, used.read_text().split())) if (used := _used()).exists() else 0.0


class Forked:
    """A process that calls `function(*arguments)`, with the methods of a Popen."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_measure, args=(_used(), function, arguments))
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
