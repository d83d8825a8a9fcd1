"""An ordinary loop over whole batches of texts, whose gradient is that of the mean over all tokens."""

from __future__ import annotations

from typing import Any

import torch

import variable_batch_size as vbs
from helpers.reference import data, network

DATASET = 50


def plain(lengths: list[int], batches: list[list[int]], max_grad_norm: float | None = None) -> list[Any]:
    """The weights of an ordinary loop over whole batches."""
    model, (x, target), number = network(), data(DATASET), torch.tensor(lengths, dtype=torch.float64)
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5, weight_decay=0.01)
    for indices in batches:
        tokens = number[indices].sum()
        if tokens == 0:
            continue
        inner.zero_grad()
        of_token = (model(x[indices]) - target[indices]).square().sum(dim=1)
        ((of_token * number[indices]).sum() / tokens).backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        inner.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


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
