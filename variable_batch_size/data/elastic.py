"""The numbers that an elastic training on GPUs needs, in the terms of Run:AI's elasticity module."""

from __future__ import annotations

from typing import NamedTuple, final

import torch

from variable_batch_size.backend import current_world
from variable_batch_size.data.fit import fit


@final
class Elastic(NamedTuple):
    """How a global batch is computed on the GPUs that there are.

    Attributes:
        steps: number of microbatches that the busiest GPU accumulates in an update.
        batch_size: maximum samples of a microbatch.
        global_batch_size: samples of an update, over all GPUs.
        gpus: number of GPUs.
        master: whether this is rank 0.
    """

    steps: int
    batch_size: int
    global_batch_size: int
    gpus: int
    master: bool


def elastic(global_batch_size: int, max_gpu_batch_size: int, gpus: int | None = None) -> Elastic:
    """Return in how many steps, and with which batch size of a GPU, a global batch is computed on the present GPUs.

    The fewest steps that memory allows, and then the smallest batch size, as `fit` finds them without a fixed shape:
    `CustomSampler(..., minibatch_size=batch_size)` computes exactly this batch, also if it is not a multiple of
    steps x batch_size x gpus.

    Source: the arguments and results are those of Run:AI's elasticity module for PyTorch.

    Args:
        global_batch_size: samples of an update.
        max_gpu_batch_size: samples of a microbatch that the memory of a GPU holds, see `find_minibatch_size`.
        gpus: number of GPUs. Default: the number of ranks, if there are several, otherwise that of the accelerators
            which this process sees, at least 1.

    Raises:
        TypeError: if an argument is not an integer.
        ValueError: if an argument is not in [1, 2**53].

    >>> elastic(global_batch_size=100, max_gpu_batch_size=30, gpus=3)
    Elastic(steps=2, batch_size=17, global_batch_size=100, gpus=3, master=True)
    """
    world = current_world()
    if gpus is None:
        gpus = world.size if world.size > 1 else max(1, torch.accelerator.device_count())
    found = fit(global_batch_size, max_gpu_batch_size, gpus, fixed_shape=False)
    return Elastic(found.rounds, found.minibatch_size, global_batch_size, gpus, world.rank == 0)
