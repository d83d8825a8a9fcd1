"""How long a training is, of whose epochs no two are alike, and where in it the trainer is."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from typing import Any, NamedTuple

from transformers import TrainerCallback

from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.plan import Plan
from variable_batch_size.integrations.schedules import warn_of_batches


class Length(NamedTuple):
    """The length of a training.

    Attributes:
        updates: number of updates.
        samples: number of samples of these, over all ranks.
        epochs: number of epochs, of which the last one may be cut short.
    """

    updates: int
    samples: int
    epochs: int


def length(sampler: Dealer, args: Any) -> Length:
    """Return the length of a training by `max_steps` or `num_train_epochs` of its arguments.

    Of a fractional last epoch, it has the updates until that fraction of the samples is reached. If a controller
    chooses the batch sizes it is an estimate.

    Raises:
        ValueError: if the trace ends before.
    """
    plan = sampler.plan
    if args.max_steps > 0:
        found = _of_updates(plan, args.max_steps)
        return found._replace(epochs=sys.maxsize) if is_adaptive(sampler) else found
    last = math.ceil(args.num_train_epochs) - 1
    epoch = plan.epoch(last)
    wanted = math.ceil(round((args.num_train_epochs - last) * plan.whole_samples(epoch), 6))  # of the last epoch
    steps = range(epoch.first_step, epoch.end_step)
    reached = bisect_left(steps, epoch.samples_before + wanted, key=lambda step: plan.samples_before(epoch, step))
    updates = epoch.first_step + reached
    return Length(updates, plan.samples_before(epoch, updates), last + 1)


def _of_updates(plan: Plan, updates: int) -> Length:
    """Return the length of a training of so many updates, or up to the plan's own end if that is earlier."""
    for epoch, alike in plan.epoch_runs(None):
        if epoch.first_step + alike * epoch.updates >= updates:
            last = plan.epoch(epoch.number + (updates - 1 - epoch.first_step) // epoch.updates)
            return Length(updates, plan.samples_before(last, updates), last.number + 1)
    return Length(epoch.end_step, epoch.samples_before + epoch.samples, epoch.number + 1)


def epochs_passed(sampler: Dealer) -> float:
    """Return how many epochs have passed, as the part of the samples that was used in the present one."""
    batches, position = sampler.batches, sampler.position
    epoch = batches.epoch(position)
    used = batches.samples_before(position) - epoch.samples_before
    return epoch.number + used / batches.plan.whole_samples(epoch)


def is_adaptive(sampler: Dealer) -> bool:
    """Return whether a controller chooses the batch sizes, so that lengths are estimates."""
    return sampler.batches.decided is not None


class Position(TrainerCallback):
    """The first callback, so that others read what it has corrected: the epoch, and an estimated number of updates."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check that the optimizer is where the training resumes, and the schedule."""
        optimizer, plan = self._trainer.variable_optimizer, self._trainer.variable_optimizer.sampler.plan
        if state.global_step > optimizer.updates:
            raise RuntimeError(
                f"a training must resume with its optimizer, but the checkpoint of step {state.global_step} has none; "
                f"resume from one that was saved with save_only_model=False"
            )
        if not optimizer.sampler.batches.arriving:
            batches = -(-plan.dataset_size // (plan.minibatch_size * args.world_size))
            warn_of_batches([self._trainer.lr_scheduler], plan, batches, state.max_steps)
        self._correct(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Correct the state after an update, and what progress bars took for the end."""
        self._correct(args, state)
        for callback in self._trainer.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:
                bar.total = state.max_steps

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the loader have the length of this epoch; Trainer tells it which one it is only after this event."""
        self._trainer.update_loader.set_epoch(self._trainer.variable_optimizer.epoch)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Clear the flag of a callback that leaves an epoch, by which the loop was told that this one is read."""
        if self._trainer._epoch_is_read:
            self._trainer._epoch_is_read = control.should_epoch_stop = False

    def _correct(self, args: Any, state: Any) -> None:
        optimizer = self._trainer.variable_optimizer
        if optimizer.sampler.batches.arriving:  # of a stream, which has none
            state.epoch = optimizer.updates / args.max_steps
            return
        state.epoch = epochs_passed(optimizer.sampler)
        if args.max_steps > 0 or not is_adaptive(optimizer.sampler):
            return
        ends = state.epoch >= args.num_train_epochs
        estimate = max(optimizer.updates + 1, length(optimizer.sampler, args).updates)
        state.max_steps = optimizer.updates if ends else estimate
