"""What the updates of a Keras model log, over all ranks, and the random numbers of their layers."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import keras
import torch

from variable_batch_size.optim.optimizer import CustomOptimizer

_UPDATES, _RANKS = 0x9E3779B1, 0x85EBCA6B  # odd numbers, so that seeds of updates and ranks are far apart


def update_loss(model: Any, optimizer: CustomOptimizer, batch_size: int) -> None:
    """Add the loss of an update, over all ranks, to the mean over the samples of the epoch."""
    for metric in model.metrics:
        if metric.name == "loss":  # the name that Keras' guides to train_step go by
            metric.update_state(optimizer.logged["loss"], sample_weight=batch_size)
            return


def merge_metrics(model: Any, optimizer: CustomOptimizer) -> None:
    """Sum the state of the other metrics over the ranks, at the end of an epoch."""
    if optimizer.backend.world.size == 1:
        return
    metrics = [metric for metric in model.metrics if metric.name != "loss"]
    summed = [v for metric in metrics for v in metric.variables if v.aggregation == "sum"]
    own = {id(variable): variable for variable in summed}.values()
    totals = [variable.value.detach().to(torch.float64) for variable in own]
    optimizer.backend.all_reduce_sum(totals)
    for variable, total in zip(own, totals, strict=True):
        variable.assign(total.to(variable.value.dtype))


def logs_of(optimizer: CustomOptimizer, batch_size: int) -> dict[str, Any]:
    """Return what an update adds to the logs of Keras."""
    logs: dict[str, Any] = {
        "batch_size": batch_size,
        "effective_learning_rate": optimizer.current_lr(),
        "samples": optimizer.samples,
    }
    if optimizer.grad_norm is not None:
        logs["grad_norm"] = optimizer.grad_norm
    with suppress(RuntimeError):  # it is not measured
        noise = optimizer.noise()
        logs["noise_scale"] = noise.sigma2 / noise.mu2 if noise.mu2 > 0 else math.nan
    return logs


def set_seeds(model: Any, optimizer: CustomOptimizer) -> None:
    """Let the layers of each rank draw other numbers in each update, the same ones after a resume.

    The model has the same seeds on all ranks, of which a checkpoint saves those of rank 0. One rank needs none of this.
    """
    world = optimizer.backend.world
    if world.size == 1:
        return
    number = (optimizer.updates * _UPDATES + world.rank * _RANKS) % 2**31
    for variable in model.non_trainable_variables:
        if variable.name == keras.random.SeedGenerator(0).state.name:
            variable.assign([int(variable.value[0]), number])
