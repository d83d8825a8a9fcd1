"""Does a schedule count updates? One whose length is a number of batches would end at another place."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size.data.sampler import CustomSampler

_LENGTHS = "T_max", "total_steps", "num_training_steps", "decay_steps", "cycle_size"  # names of lengths of schedules
_FEW = 8  # batches an epoch, up to which nothing is said: many lengths are a multiple of so few by chance


def check_schedule(schedule: Any, sampler: CustomSampler, batches: int, updates: float | None = None) -> None:
    """Warn if a schedule ends after the batches of some epochs instead of their updates.

    Args:
        schedule: a schedule of torch, transformers, Ignite or Keras, of which it reads `T_max`, `total_steps`,
            `num_training_steps`, `cycle_size` and `decay_steps`, also within a `SequentialLR`.
        sampler: the sampler.
        batches: what a script takes for the steps of an epoch, such as `len(loader)`; of few it says nothing.
        updates: number of updates of the training, if it is known; a schedule of this length, or of some epochs, is
            right.

    >>> import torch
    >>> inner = torch.optim.SGD([torch.zeros(1)])
    >>> schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=3 * 25)  # of batches of 8
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error")
    ...     check_schedule(schedule, CustomSampler(200, 60), batches=25)
    Traceback (most recent call last):
    UserWarning: a schedule must count updates, but T_max=75 is the number of batches of 3 epochs of the
    loader, which have 12 updates; pass T_max=12, or the number of all updates
    """
    plan = sampler.plan
    for name, steps in {*_lengths_in(schedule)}:
        epochs, remainder = divmod(steps, max(batches, 1))  # as if it counted batches
        if batches <= _FEW or remainder or not epochs or steps in (updates, plan.max_updates):
            continue
        try:
            correct = plan.epoch(epochs - 1).end_step  # number of updates of these epochs
            ends = (plan.epoch(number).end_step for number in range(plan.first_epoch, steps))
            is_right = steps in takewhile(steps.__ge__, ends)  # it ends with an epoch, in updates
        except ValueError:  # the trace ends before
            continue
        if not is_right:
            warnings.warn(
                f"a schedule must count updates, but {name}={steps} is the number of batches of {epochs} epochs of the "
                f"loader, which have {correct} updates; pass {name}={correct}, or the number of all updates",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )


def _lengths_in(schedule: Any) -> Iterator[tuple[str, int]]:
    """Yield the names and values of the attributes that say after how many steps a schedule ends."""
    yield from ((name, value) for name in _LENGTHS if isinstance(value := getattr(schedule, name, None), int))
    # Private attributes of SequentialLR and ChainedScheduler, which have no public ones: the schedules in it, and the
    # steps at which one follows another.
    parts, milestones = getattr(schedule, "_schedulers", ()), getattr(schedule, "_milestones", ())
    before = milestones[-1] if milestones else 0  # steps before the last part of a SequentialLR, which ends it
    parts = parts[-1:] if before else parts
    yield from ((name, before + steps) for part in parts for name, steps in _lengths_in(part))
    for function in getattr(schedule, "lr_lambdas", ()):  # a functools.partial, as in transformers
        yield from ((name, value) for name, value in getattr(function, "keywords", {}).items() if name in _LENGTHS)
