"""How long a training is that a trainer's settings give in epochs, also fractional ones, or in updates."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from typing import NamedTuple

from variable_batch_size.data.clock import Clock
from variable_batch_size.data.deal import Step
from variable_batch_size.data.plan import Plan
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.optimizer import CustomOptimizer


class Length(NamedTuple):
    """The length of a training.

    Attributes:
        updates: number of updates.
        samples: number of samples of these, over all ranks.
        epochs: number of epochs, of which the last one may be cut short.
        longest: number of updates of the longest epoch.
    """

    updates: int
    samples: int
    epochs: int
    longest: int


def length_of_epochs(plan: Plan, epochs: float) -> Length:
    """Return the length of a training of so many epochs, > 0.

    Of a fractional last epoch, it has the updates until that fraction of the samples is reached. If the trace grows,
    or the plan has another end, it is an estimate, or that end.

    Raises:
        ValueError: if the trace ends before.
    """
    last = math.ceil(epochs) - 1
    epoch = plan.epoch(last)
    wanted = math.ceil(round((epochs - last) * plan.whole_samples(epoch), 6))  # samples of the last epoch
    steps = range(epoch.first_step, epoch.end_step)
    reached = bisect_left(steps, epoch.samples_before + wanted, key=lambda step: plan.samples_before(epoch, step))
    updates = epoch.first_step + reached
    longest = _longest(plan, last + 1)
    return Length(updates, plan.samples_before(epoch, updates), last + 1, longest)


def length_of_updates(plan: Plan, updates: int) -> Length:
    """Return the length of a training of so many updates, >= 1, or up to the plan's own end if that is earlier.

    Raises:
        ValueError: if the trace ends before.
    """
    longest = 0
    for epoch, alike in plan.epoch_runs(None):
        steps = epoch.updates
        longest = max(longest, steps)
        if epoch.first_step + alike * steps >= updates:
            last = plan.epoch(epoch.number + (updates - 1 - epoch.first_step) // steps)
            return Length(updates, plan.samples_before(last, updates), last.number + 1, longest)
    return Length(epoch.end_step, epoch.samples_before + epoch.samples, epoch.number + 1, longest)


def _longest(plan: Plan, epochs: int) -> int:
    runs = plan.epoch_runs(epochs) if plan.first_epoch < epochs else iter(())
    return max((epoch.updates for epoch, _ in runs), default=sys.maxsize)


def epochs_passed(clock: Clock) -> float:
    """Return how many epochs have passed, as the part of the samples that was used in the present one."""
    epoch, plan = clock.epoch, clock.plan
    used = plan.samples_before(epoch, clock.step) - epoch.samples_before
    return epoch.number + used / plan.whole_samples(epoch)


def microbatches_of_update(optimizer: CustomOptimizer) -> list[Microbatch]:
    """Return this rank's microbatches of the next update, before the first of them reached `step()`."""
    step, world = _next_step(optimizer), optimizer.sampler.world
    return [step.microbatch(number, world) for number in range(step.rounds(world))]


def most_microbatches(optimizer: CustomOptimizer) -> int:
    """Return how many microbatches the rank with the most of them has in the next update."""
    return -(-_next_step(optimizer).num_microbatches // optimizer.sampler.world.size)


def _next_step(optimizer: CustomOptimizer) -> Step:
    sampler = optimizer.sampler
    return sampler.plan.step(sampler.plan.epoch(optimizer.epoch), optimizer.updates, sampler.dealing)


def is_growing(sampler: CustomSampler) -> bool:
    """Return whether a controller chooses the batch sizes, so that lengths are estimates."""
    return sampler._feed.plans.decided is not None
