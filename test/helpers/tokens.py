"""The samples of the updates of a training whose samples count tokens."""

from __future__ import annotations

import torch

import variable_batch_size as vbs
from helpers.reference import network

DATASET = 50


def batches_of(sizes: list[int]) -> list[list[int]]:
    """The samples of each update."""
    sampler = vbs.CustomSampler(DATASET, sizes, 1, 0, DATASET, on_end="hold", fixed_shape=False)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(network().parameters(), lr=0.0), sampler)
    result: list[list[int]] = []
    while len(result) < len(sizes):
        sampler.set_epoch(optimizer.epoch)
        for indices in sampler:
            result.append(indices)
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.sum().backward()
            optimizer.step()
    return result[: len(sizes)]
