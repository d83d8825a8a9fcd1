"""End the threads of gloo's groups before the interpreter ends.

Gloo aborts a process that ends within a sum, or while a thread of a group, after a sum, still releases a tensor. A
group ends its threads when nothing refers to it any more.
"""

from __future__ import annotations

import atexit
import gc
import sys
from types import FunctionType

import torch.distributed as dist

from variable_batch_size.backend.channel import close_channels

_needed = False


def end_threads_at_exit() -> None:
    """Ask for it, because ranks communicate."""
    global _needed
    _needed = True


@atexit.register  # when this module is imported, so that handlers of the user's program are called before
def _end_threads() -> None:
    if not _needed:
        return
    close_channels()
    if dist.is_initialized() and all(entry.endswith(":gloo") for entry in dist.get_backend_config().split(",")):
        dist.destroy_process_group()  # not if it is NCCL, which talks to other ranks then
    functional = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(functional).values() if functional else ():
        if isinstance(function, FunctionType):
            function.__defaults__ = None  # the default group, if torch imported this module after it was initialized
    gc.collect()  # what an exception has left refers to groups in cycles
