"""What the updates of a Keras model log, over all ranks, and the random numbers of their layers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

import torch

from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.optimizer import CustomOptimizer

_UPDATES, _RANKS = 0x9E3779B1, 0x85EBCA6B  # odd numbers, so that seeds of updates and ranks are far apart
_SEEDS = "seed_generator_state"  # the name of the variable of a keras.random.SeedGenerator


def update_loss(model: Any, optimizer: CustomOptimizer, batch_size: int) -> None:
    """Add the loss of an update, over all ranks, to the mean over the samples of the epoch."""
    for metric in model.metrics:
        if metric.name == "loss":  # the name that Keras' guides to train_step go by
            metric.update_state(optimizer.logged["loss"], sample_weight=batch_size)
            return


@contextmanager
def by_samples(model: Any, part: Microbatch) -> Iterator[None]:
    """Let what a forward adds to metrics, as the loss of each output, count by its samples instead of its rows."""
    own = _summed(model) if part.samples != part.rows else []
    before = [variable.value.detach().clone() for variable in own]
    yield
    for variable, old in zip(own, before, strict=True):
        added = (variable.value.detach() - old) * (part.samples / part.rows)
        variable.assign(old + added.to(old.dtype))


def merge_metrics(model: Any, optimizer: CustomOptimizer) -> None:
    """Sum the state of the other metrics over the ranks, at the end of an epoch."""
    if optimizer.backend.world.size > 1:
        for variable, total in _totals(model, optimizer):
            variable.assign(total)


def _summed(model: Any) -> list[Any]:
    """Return the variables of all metrics but the loss that are sums over samples."""
    metrics = [metric for metric in model.metrics if metric.name != "loss"]
    found = [v for metric in metrics for v in metric.variables if v.aggregation == "sum"]
    return list({id(variable): variable for variable in found}.values())


def _totals(model: Any, optimizer: CustomOptimizer) -> list[tuple[Any, torch.Tensor]]:
    """Return these variables, each with its sum over the ranks; every rank has to call it."""
    own = _summed(model)
    totals = [variable.value.detach().to(torch.float64, copy=True) for variable in own]
    optimizer.backend.all_reduce_sum(totals)
    return [(variable, total.to(variable.value.dtype)) for variable, total in zip(own, totals, strict=True)]


def logs_of_rank_0(logs: dict[str, Any], optimizer: CustomOptimizer) -> dict[str, Any]:
    """Return the logs of an epoch with the numbers of rank 0, so that callbacks decide alike on all ranks.

    Validation may differ, because each rank has its own moving averages of batch normalization.
    """
    if optimizer.backend.world.size == 1:
        return logs
    numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
    return {**logs, **json.loads(optimizer.agreement.gather("the end of an epoch", json.dumps(numbers))[0])}


def check_decisions(model: Any, optimizer: CustomOptimizer, learning_rate: float) -> None:
    """Check that callbacks have decided alike on all ranks.

    Raises:
        RuntimeError: on every rank, if not.
    """
    message = json.dumps([learning_rate, bool(model.stop_training)])
    rows = [json.loads(row) for row in optimizer.agreement.gather("the end of an epoch", message)]
    for rank, row in enumerate(rows):
        if row != rows[0]:
            (first, stops), (other, ends) = rows[0], row
            raise RuntimeError(
                f"all ranks must end an epoch with the same learning_rate and stop_training, but they are {first:.6g} "
                f"and {stops} on rank 0, {other:.6g} and {ends} on rank {rank}; pass callbacks that set "
                f"them, such as EarlyStopping, on every rank"
            )


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
        """Return the state of all metrics, over all ranks; every rank has to call it."""
        optimizer = self._model.custom_optimizer
        if optimizer.backend.world.size == 1 or optimizer.sampler.clock.finished:  # they are merged then
            return self.of_this_rank()
        totals = {id(variable): total for variable, total in _totals(self._model, optimizer)}
        own = enumerate(self._model.metrics_variables)
        return {str(n): totals.get(id(v), v.value.detach()).clone() for n, v in own}

    def of_this_rank(self) -> dict[str, Any]:
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
