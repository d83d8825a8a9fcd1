"""Choose the backend for a set of parameters, and find the world of the current thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from variable_batch_size.backend.base import Backend
from variable_batch_size.backend.distributed import DistributedBackend
from variable_batch_size.backend.local import LocalBackend
from variable_batch_size.backend.sent_numbers import SentNumbers
from variable_batch_size.backend.xla import XlaBackend
from variable_batch_size.world import World

_COMPILING = {"tpu"}  # devices that torch.distributed connects, and that compile graphs with numbers as constants


def detect(
    parameters: Iterable[Tensor], world: World | None = None, process_group: dist.ProcessGroup | None = None
) -> Backend:
    """Return the backend that fits the parameters and the process.

    Args:
        parameters: parameters of the model.
        world: the world for which a sampler chooses the samples, if it is known.
        process_group: the ranks that share a batch, if these are not all ranks of the job.

    Returns:
        `XlaBackend` if any parameter is on an XLA device; otherwise `DistributedBackend` if a default process group is
        initialized; otherwise `LocalBackend`. On the devices of TorchTPU, numbers are tensors.

    Raises:
        RuntimeError: if a launcher has started several processes, `torch.distributed` is not initialized, and no world
            is given.
    """
    parameters = [*parameters]
    sent = numbers_for(parameters)
    if process_group is not None:
        return DistributedBackend(process_group, job=True, sent=sent)
    if any(parameter.device.type == "xla" for parameter in parameters):
        return XlaBackend()
    if dist.is_available() and dist.is_initialized():
        return DistributedBackend(sent=sent)
    if world is None:
        _check_not_launched()
    return LocalBackend(sent=sent)


def numbers_for(parameters: Iterable[Tensor]) -> SentNumbers | None:
    """Return how numbers are sent to the device of these parameters; None if it takes Python numbers in operations."""
    kinds = {parameter.device.type for parameter in parameters} & _COMPILING
    return SentNumbers(kinds.pop()) if kinds else None


def current_world() -> World:
    """Return the world of the current thread: from `torch.distributed` if initialized, otherwise from PyTorch/XLA.

    PyTorch/XLA is asked only if torch_xla has been imported. Without either, it is a world of one rank.

    Raises:
        RuntimeError: if a launcher has started several processes, but there is neither.
    """
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    if "torch_xla" in sys.modules:
        return XlaBackend().world
    _check_not_launched()
    return World()


def resolve_world(rank: int | None, num_replicas: int | None) -> World:
    """Return the world of a user's `rank` and `num_replicas`; by default the world of the current thread."""
    if rank is None and num_replicas is None:
        return current_world()
    if rank is None or num_replicas is None:
        raise ValueError(
            f"num_replicas and rank must be passed together, got num_replicas={num_replicas} and rank={rank}; pass "
            f"both, or neither to take them from torch.distributed or PyTorch/XLA"
        )
    return World(rank, num_replicas)


def runs_on_xla() -> bool:
    """Return whether PyTorch/XLA defines the world: torch_xla is imported, and no process group of another backend."""
    if dist.is_available() and dist.is_initialized():
        return str(dist.get_backend()) == "xla"
    return "torch_xla" in sys.modules


def _check_not_launched() -> None:
    """Raise RuntimeError if a launcher has started several processes, which would train separate copies."""
    names = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]  # of torchrun, Open MPI, and MPICH or Intel MPI
    names += ["SLURM_NTASKS"] if "SLURM_STEP_ID" in os.environ else []  # of srun; a batch script has it, too
    for name in names:
        size = os.environ.get(name, "1")
        if size.isdecimal() and int(size) > 1:
            raise RuntimeError(
                f"{name} is {size}, but torch.distributed is not initialized: each process would train a copy of its "
                "own; call torch.distributed.init_process_group() first, or pass num_replicas and rank to the sampler"
            )
