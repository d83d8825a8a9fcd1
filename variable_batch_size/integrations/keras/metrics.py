"""What the updates of a Keras model log, over all ranks, and the random numbers of their layers."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, final

import torch

from variable_batch_size.optim.optimizer import CustomOptimizer

_UPDATES, _RANKS = 0x9E3779B1, 0x85EBCA6B  # odd numbers, so that seeds of updates and ranks are far apart
_SEEDS = "seed_generator_state"  # the name of the variable of a keras.random.SeedGenerator


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


def seeds_of(model: Any) -> list[Any]:
    """Return the variables from which the layers draw: their seed, and how often they have drawn."""
    return [variable for variable in model.non_trainable_variables if variable.name == _SEEDS]


def set_seeds(model: Any, optimizer: CustomOptimizer) -> None:
    """Let the layers of each rank draw other numbers in each update, the same ones after a resume.

    The model has the same seeds on all ranks, of which a checkpoint saves those of rank 0. One rank needs none of this.
    """
    world = optimizer.backend.world
    if world.size == 1:
        return
    number = (optimizer.updates * _UPDATES + world.rank * _RANKS) % 2**31
    for variable in seeds_of(model):
        variable.assign([int(variable.value[0]), number])


@final
class EpochMetrics:
    """The metrics of the epoch under way, for a checkpoint within it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._saved: list[torch.Tensor] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all metrics, of this rank but for the loss."""
        return {str(n): v.value.detach().clone() for n, v in enumerate(self._model.metrics_variables)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state, for `restore`."""
        self._saved = [state[str(number)] for number in range(len(state))]

    def drop(self) -> None:
        """Drop the state: it is that of an epoch that has ended."""
        self._saved = None

    def restore(self, rank: int) -> None:
        """Set the metrics to the loaded state, once; of ranks but the first only the loss, which is that of all."""
        if self._saved is None:
            return
        own = self._model.metrics_variables
        loss = {id(v) for metric in self._model.metrics if metric.name == "loss" for v in metric.variables}
        if [tuple(v.shape) for v in own] == [tuple(value.shape) for value in self._saved]:
            for variable, value in zip(own, self._saved, strict=True):
                if rank == 0 or id(variable) in loss:
                    variable.assign(value.to(variable.value.device))
        self._saved = None
