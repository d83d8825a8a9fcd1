"""Schedules whose length was counted in batches of the user's loader, although they step once an update."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size.data.plan import Plan

_LENGTHS = "T_max", "total_steps", "num_training_steps", "decay_steps"
_FEW = 8  # batches of an epoch of which any number may be a multiple by chance


def lengths(schedule: Any) -> Iterator[tuple[str, int]]:
    """Yield the arguments of torch, transformers and Keras after how many steps a schedule ends, and their values."""
    yield from ((name, value) for name in _LENGTHS if isinstance(value := getattr(schedule, name, None), int))
    parts = getattr(schedule, "_schedulers", ())  # of SequentialLR and ChainedScheduler, which have no public names
    before = sum(getattr(schedule, "_milestones", ())[-1:])
    yield from ((name, before + steps) for part in parts[-1 if before else 0 :] for name, steps in lengths(part))
    for function in getattr(schedule, "lr_lambdas", ()):  # a functools.partial, as in transformers
        yield from ((name, value) for name, value in getattr(function, "keywords", {}).items() if name in _LENGTHS)


def warn_of_batches(schedules: Iterable[Any], plan: Plan, batches: int, updates: float | None = None) -> None:
    """Warn of a schedule that ends after a multiple of `batches`, those of an epoch, that is no number of updates.

    A length of some epochs of the plan, or of `updates`, those of the training if they are known, is right.
    """
    for name, steps in {pair for schedule in schedules for pair in lengths(schedule)}:
        epochs, rest = divmod(steps, max(batches, 1))
        if batches <= _FEW or rest or not epochs or steps in (updates, plan.max_updates):
            continue
        try:
            made = plan.epoch(epochs - 1).end_step
            ends = (plan.epoch(number).end_step for number in range(plan.first_epoch, steps))
            right = steps in takewhile(steps.__ge__, ends)
        except ValueError:  # the trace ends before
            continue
        if not right:
            warnings.warn(
                f"a schedule must count updates, but {name}={steps} is the number of batches of {epochs} epochs of the "
                f"loader, which have {made} updates; pass {name}={made}, or the number of updates of the training",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )
