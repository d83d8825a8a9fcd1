"""The epochs that are left of a training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from variable_batch_size._validation import check_number, type_error, value_error
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.lr_scheduler import ProgressScheduler
from variable_batch_size.optim.optimizer import CustomOptimizer

Unit = Literal["epochs", "progress", "samples", "updates"]


def remaining_epochs(
    sampler: CustomSampler,
    optimizer: CustomOptimizer | Sequence[CustomOptimizer],
    until: float | ProgressScheduler | None = None,
    by: Unit = "epochs",
) -> Iterator[int]:
    """Yield the number of each epoch that is left, after setting it on the sampler and on the optimizer.

    After a restore it begins with the epoch under way, of which the loader yields the rest. It ends when
    `optimizer.done` is True, or the training has reached `until`. That is only checked between epochs: to end at an
    update or a sample, pass `max_updates` or `max_samples` to the sampler; to end with a schedule, leave the loop over
    the loader when `scheduler.done` is True.

    Source: `remaining_epochs_until` of AdaptDL, Qiao et al. 2021, arXiv 2008.12260.

    Args:
        sampler: the sampler.
        optimizer: its optimizer; or all of its optimizers, of which the first one tells how far the training is.
        until: the end of the training, in the unit of `by`; or a `ProgressScheduler` with a `total`, which ends it when
            `scheduler.done` is True. Default: where the sampler ends it.
        by: "epochs", "progress" (updates at `ref_batchsize`), "samples" or "updates", as the optimizer counts them.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `by` is unknown or passed with a schedule, an optimizer has another sampler, nothing ends the
            training, or the schedule has no `total` or counts another optimizer.
    """
    optimizers = [optimizer] if isinstance(optimizer, CustomOptimizer) else optimizer
    _check(sampler, optimizers, until, by)
    return _remaining(sampler, optimizers, math.inf if until is None else until, by)


def _remaining(
    sampler: CustomSampler, optimizers: Sequence[CustomOptimizer], until: float | ProgressScheduler, by: Unit
) -> Iterator[int]:
    first, epoch = optimizers[0], -1
    while not first.done:
        epoch = max(first.epoch, epoch + 1)  # the loop may have left the last one before its end
        if isinstance(until, ProgressScheduler):
            reached = until.done
        else:
            reached = (epoch if by == "epochs" else getattr(first, by)) >= until
        # The end of an epoch that a restore has left to the loop comes first; the number of the epoch includes it.
        counts_epochs = by == "epochs" and not isinstance(until, ProgressScheduler)
        if reached and (counts_epochs or not sampler.clock.end_pending):
            return
        sampler.set_epoch(epoch)
        for optimizer in optimizers:
            optimizer.set_epoch(epoch)
        yield epoch


def _check(sampler: object, optimizers: object, until: object, by: object) -> None:
    if not isinstance(sampler, CustomSampler):
        raise type_error("sampler must be a vbs.CustomSampler", sampler, "pass the sampler, then the optimizer")
    if not isinstance(optimizers, Sequence) or not optimizers:
        raise type_error("optimizer must be a vbs.CustomOptimizer, or a list of them", optimizers, "pass the wrapper")
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, CustomOptimizer):
            raise type_error("optimizer must be a vbs.CustomOptimizer", optimizer, "pass the wrapper")
        if optimizer.sampler is not sampler:
            requirement = "remaining_epochs() needs the optimizers of the sampler"
            raise value_error(requirement, f"one of another sampler, number {number}", "pass optimizer.sampler")
    if by not in get_args(Unit):
        raise value_error('by must be "epochs", "progress", "samples" or "updates"', repr(by), "pass one of them")
    if isinstance(until, ProgressScheduler):
        if by != "epochs":
            raise value_error("a scheduler as until= has its own unit", f"by={by!r}", "leave out by=")
        until.check_ends(optimizers)
    elif until is not None:
        check_number(until, "until", "pass the end of the training in the unit of by=")
    elif not sampler.plan.ends:
        requirement = "something must end the training"
        remedy = 'pass until=, or max_updates= or max_samples= to the sampler, or on_end="stop" with a trace that ends'
        raise value_error(requirement, "neither an end of the sampler nor until=", remedy)
