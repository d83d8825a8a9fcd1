"""Schedules whose length was counted in batches of the user's loader, although they step once an update."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size.data.plan import Plan

_LENGTHS = "T_max", "total_steps", "total_iters", "num_training_steps", "decay_steps"


def lengths(schedule: Any) -> Iterator[tuple[str, int]]:
    """Yield the arguments that say after how many steps a schedule ends, and their values.

    It looks into schedulers of torch, those that they consist of, the keywords of `functools.partial` in a `LambdaLR`,
    as transformers writes them, and schedules of Keras.
    """
    for name in _LENGTHS:
        if isinstance(value := getattr(schedule, name, None), int):
            yield name, value
    for part in getattr(schedule, "_schedulers", ()):  # of SequentialLR and ChainedScheduler, which have no public name
        yield from lengths(part)
    for function in getattr(schedule, "lr_lambdas", ()):
        yield from ((name, value) for name, value in getattr(function, "keywords", {}).items() if name in _LENGTHS)


def warn_of_batches(
    schedules: Iterable[Any], plan: Plan, batches: int, updates: float | None = None, steps_per_update: int = 1
) -> None:
    """Warn of a schedule that ends after a number of batches instead of updates.

    Args:
        schedules: the schedules of the training, those of torch or of Keras.
        plan: the plan of the training.
        batches: number of batches of the user's loader in an epoch.
        updates: number of updates of the training, if it is known; a schedule of this length, or of some epochs, is
            right.
        steps_per_update: number of steps of a schedule in an update.
    """
    for name, steps in {pair for schedule in schedules for pair in lengths(schedule)}:
        epochs, rest = divmod(steps, batches)
        if rest or not epochs or steps in (updates, plan.max_updates):
            continue
        ends = (plan.epoch(number).end_step * steps_per_update for number in range(plan.first_epoch, steps))
        try:
            made = plan.epoch(epochs - 1).end_step * steps_per_update
            right = steps in takewhile(steps.__ge__, ends)
        except ValueError:  # the trace ends before
            continue
        if not right:
            warnings.warn(
                f"a schedule of the learning rate must count updates, but {name}={steps} is the number of batches of "
                f"{epochs} epochs of the loader, in which it makes {made} steps: the rate will not be where it should "
                f"be at their end; pass {name}={made}, or the number of updates of the training",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )
