"""Which backend fits where parameters are, and which world this thread of execution is a rank of."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from variable_batch_size.backend.base import Backend
from variable_batch_size.backend.distributed import DistributedBackend
from variable_batch_size.backend.local import LocalBackend
from variable_batch_size.backend.xla import XlaBackend
from variable_batch_size.world import World


def detect(parameters: Iterable[Tensor]) -> Backend:
    """The backend that fits where the parameters are: XLA, else an initialised process group, else one process."""
    if any(parameter.device.type == "xla" for parameter in parameters):
        return XlaBackend()
    if dist.is_available() and dist.is_initialized():
        return DistributedBackend()
    return LocalBackend()


def current_world() -> World:
    """The world that this thread of execution is a rank of, as `torch.distributed` or PyTorch/XLA tell it."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    if "torch_xla" in sys.modules:
        return XlaBackend().world
    return World()
