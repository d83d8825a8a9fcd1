"""Choose the backend for a set of parameters, and find the world of the current thread."""

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
    """Return the backend that fits the parameters and the process.

    Args:
        parameters: parameters of the model.

    Returns:
        `XlaBackend` if any parameter is on an XLA device; otherwise `DistributedBackend` if a default process group is
        initialized; otherwise `LocalBackend`.
    """
    if any(parameter.device.type == "xla" for parameter in parameters):
        return XlaBackend()
    if dist.is_available() and dist.is_initialized():
        return DistributedBackend()
    return LocalBackend()


def current_world() -> World:
    """Return the world of the current thread: from `torch.distributed` if initialized, otherwise from PyTorch/XLA.

    PyTorch/XLA is asked only if torch_xla has been imported. Without either, it is a world of one rank.
    """
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    if "torch_xla" in sys.modules:
        return XlaBackend().world
    return World()
