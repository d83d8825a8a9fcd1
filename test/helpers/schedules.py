"""Schedulers of torch that tests step by reference updates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

every_by = pytest.mark.parametrize("by", ["progress", "samples", "updates"])


def counter(optimizer: Optimizer) -> LambdaLR:
    """A scheduler whose `last_epoch` is the number of steps that it has taken."""
    return LambdaLR(optimizer, lambda step: 1 / (step + 1))


def sequential(optimizer: Optimizer) -> LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer: Optimizer) -> LRScheduler:
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.8), lr_scheduler.StepLR(optimizer, 2)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": counter,
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4]),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.05, step_size_up=2),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.1, total_steps=60),
}
