"""What a DistributedDataParallel must be, so that it can sum the gradients of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from variable_batch_size.backend import Backend, DistributedBackend


def check_members(module: DistributedDataParallel, parameters: Sequence[Tensor]) -> None:
    """Raise ValueError unless all parameters of an optimizer are in a module, and real."""
    own = {id(parameter) for parameter in module.parameters()}
    for number, parameter in enumerate(parameters):
        if parameter.is_complex():
            raise ValueError(
                f"the parameters that a DistributedDataParallel sums by a hook must be real, but parameter {number} "
                f"has dtype {parameter.dtype}; train the bare module, and pass that as model="
            )
        if id(parameter) not in own:
            raise ValueError(
                f"the DistributedDataParallel that is passed as model= must have all parameters of the optimizer, but "
                f"parameter {number}, of shape {tuple(parameter.shape)}, is not in it; put all of them in one module, "
                f"and wrap that"
            )


def check_ranks(module: DistributedDataParallel, backend: Backend) -> None:
    """Raise ValueError unless a module sums over the ranks of a backend."""
    ranks = dist.get_process_group_ranks(module.process_group)
    own = backend.ranks if isinstance(backend, DistributedBackend) else [*range(backend.world.size)]
    if ranks != own:
        raise ValueError(
            f"model= must be a DistributedDataParallel over the ranks that share a batch, but it has ranks {ranks} and "
            f"the optimizer {own}; pass the same process_group to both"
        )


def check_forward(forward: bool) -> None:
    """Raise RuntimeError unless a module's forward of the last microbatch of a step has begun when that was due."""
    if not forward:
        raise RuntimeError(
            "a DistributedDataParallel that is passed as model= must sum in the last backward() of a step, but no "
            "forward of it came after the step() of the microbatch before; call it (not its .module), then backward() "
            "and step(), before the forward of the next microbatch"
        )


def reset(module: DistributedDataParallel) -> None:
    """Let a module expect no gradients of an earlier forward, if torch can."""
    of_torch = getattr(module.reducer, "_reset_state", None)
    if of_torch is not None:
        of_torch()
