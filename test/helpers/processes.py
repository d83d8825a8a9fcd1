"""Processes of a test that begin with torch imported: they are forked from one that has done it, without threads."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

IMPORTED = ["pytest", "torch.distributed", "variable_batch_size.optim", "helpers.distributed_jobs"]


def spawn(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Call `function(rank, *args)` in processes, as `torch.multiprocessing.spawn` does: it raises if one fails.

    The processes have the environment variables of the first call in this process.
    """
    multiprocessing.set_forkserver_preload(IMPORTED)
    mp.start_processes(function, args, nprocs, start_method="forkserver")
