"""One branch: trained for some updates, with the loss of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, final

from tqdm import tqdm

from variable_batch_size.checkpoint.rng_states import get_rng_states, set_rng_states
from variable_batch_size.evaluation.curve import MEANS, TOTALS, Curve
from variable_batch_size.evaluation.loop import Parts, evaluate, limited_threads, metrics_of, updates_of
from variable_batch_size.evaluation.task import Task
from variable_batch_size.optim.optimizer import CustomOptimizer


@final
@dataclass(frozen=True)
class Trial:
    """What a branch has brought.

    Attributes:
        name: of the candidate, or the batch size.
        order: number of the order of samples, 0 for that of the training.
        status: "finished", or "diverged": a loss was not finite, or above 10 times that of the untrained model.
        losses: of each update, the mean over its samples before it changed the weights; after a divergence none.
        samples: of each update.
        metrics: of the task's evaluation at the end; empty after a divergence.
    """

    name: str
    order: int
    status: Literal["finished", "diverged"]
    losses: tuple[float, ...]
    samples: tuple[int, ...]
    metrics: Mapping[str, float]


@contextmanager
def kept_random_numbers(threads: int) -> Iterator[None]:
    """Train with so many threads; restore threads and host RNG states afterwards."""
    states = get_rng_states()
    try:
        with limited_threads(threads):
            yield
    finally:
        set_rng_states(states)


def untrained_metrics(task: Task, seed: int) -> Mapping[str, float]:
    """Return what the task's evaluation says of the untrained model."""
    return metrics_of(task, task.model(seed))


def train_trial(
    parts: Parts,
    name: str,
    order: int,
    untrained: Mapping[str, float],
    bar: tqdm[Any] | None = None,
    factor: Callable[[int], float] = lambda update: 1.0,
) -> Trial:
    """Train a branch to its end.

    Args:
        parts: its objects.
        name: of the candidate, or the batch size.
        order: number of the order of samples.
        untrained: metrics of the untrained model.
        bar: counts samples.
        factor: update of the branch -> factor on the learning rate, beside that of the schedule.
    """
    optimizer, scheduler = parts.optimizer, parts.scheduler
    curve = Curve(None, parts.sampler.plan.minibatch_size)
    curve.evaluation(0, 0, 0.0, untrained)
    losses: list[float] = []
    sizes: list[int] = []
    before, rates = optimizer.samples, _scale(optimizer, factor(0))
    for updated in updates_of(parts, curve):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if updated and scheduler is not None:
            scheduler.step()
        curve.update(optimizer.updates, optimizer.current_lr())
        losses.append(curve.last)  # type: ignore[arg-type]
        sizes.append(optimizer.samples - before)
        if bar is not None:
            bar.update(sizes[-1])
        before, rates = optimizer.samples, _scale(optimizer, factor(len(losses)))
    if not curve.diverged:
        evaluate(parts, curve)
    if curve.diverged:
        return Trial(name, order, "diverged", tuple(losses), tuple(sizes), {})
    last = curve.rows[-1]
    values = {key: value for key, value in last.items() if key not in (*TOTALS, *MEANS)}
    metrics = {key: math.nan if value is None else value for key, value in values.items()}
    return Trial(name, order, "finished", tuple(losses), tuple(sizes), metrics)


def _scale(optimizer: CustomOptimizer, factor: float) -> list[Any]:
    """Multiply the learning rate of each parameter group for an update, and return what they were."""
    rates = [group["lr"] for group in optimizer.param_groups]
    if factor != 1:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
    return rates
