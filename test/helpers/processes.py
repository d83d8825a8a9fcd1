"""Processes of a test that begin with torch imported: they are forked from one that has done it, without threads."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

IMPORTED = ["pytest", "torch.distributed", "variable_batch_size.optim", "helpers.distributed_jobs"]
IMPORTED += ["torch.distributed.fsdp", "variable_batch_size.integrations.torchft"]  # the last one if it is installed


def spawn(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Call `function(rank, *args)` in processes, as `torch.multiprocessing.spawn` does: it raises if one fails.

    The processes have the environment variables of the first call in this process.
    """
    multiprocessing.set_forkserver_preload(IMPORTED)
    mp.start_processes(_call, (function, args), nprocs, start_method="forkserver")


def _call(rank: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # after a fork its first call may be made by one thread only (caffe2's thread pool)
    function(rank, *args)


def forked(function: Callable[..., None], args: tuple[Any, ...]) -> multiprocessing.process.BaseProcess:
    """Call `function(*args)` in such a process."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    process = multiprocessing.get_context("forkserver").Process(target=function, args=args)
    process.start()
    return process
