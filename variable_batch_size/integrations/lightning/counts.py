"""What Lightning derives from the length of the first epoch, while epochs have different numbers of updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from lightning.pytorch import Trainer

from variable_batch_size.data.plan import Plan


class _HasPlan(Protocol):
    @property
    def plan(self) -> Plan: ...


def count_updates(trainer: Trainer, updates: Callable[[], _HasPlan | None]) -> None:
    """Let `trainer.estimated_stepping_batches` be the number of updates of the training.

    Lightning computes it as the length of the first epoch times the number of epochs, in a property of the Trainer, so
    that only a subclass can correct it: the trainer becomes an instance of one.
    """
    vars(trainer)["_vbs_updates"] = updates
    if not hasattr(type(trainer), "_vbs_counts"):
        trainer.__class__ = _counting(type(trainer))


def _counting(kind: type[Trainer]) -> type[Trainer]:
    def estimated_stepping_batches(self: Trainer) -> int | float:
        if self.train_dataloader is None:
            self.fit_loop.setup_data()
        updates: _HasPlan | None = vars(self)["_vbs_updates"]()
        if updates is None:
            return super(counting, self).estimated_stepping_batches
        return total_updates(updates.plan, self.max_epochs, self.max_steps)

    counting: type[Trainer] = type(
        kind.__name__,
        (kind,),
        {"estimated_stepping_batches": property(estimated_stepping_batches), "_vbs_counts": True},
    )
    return counting


def total_updates(plan: Plan, max_epochs: int | None, max_steps: int) -> int | float:
    """Return the number of updates of a training; infinity if nothing ends it.

    Args:
        plan: the plan; with an adaptive trace the number is an estimate, as if the last batch size stayed.
        max_epochs: number of epochs, or -1.
        max_steps: number of updates, or -1.
    """
    limit = math.inf if max_steps == -1 else max_steps
    if max_epochs is not None and max_epochs >= 0:  # for 0, that of one epoch, as in Lightning
        return min(plan.epoch(max(max_epochs - 1, plan.first_epoch)).end_step, limit)
    if plan.ends:
        *_, (last, _) = plan.epoch_runs(None)
        return min(last.end_step, limit)
    return limit


def set_epoch_length(trainer: Trainer, updates: int) -> None:
    """Tell the loops of Lightning how many updates the epoch under way has.

    They read the length of a loader when they get it, and again only if a hook of the user returns a new one. The two
    private objects are those in which they keep it.
    """
    loop, limit = trainer.fit_loop, trainer.limit_train_batches
    if isinstance(limit, int):  # with fast_dev_run
        updates = min(updates, limit)
    loop.max_batches = updates
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(updates * trainer.val_check_interval))
    if loop._combined_loader is not None:
        loop._combined_loader.limits = [updates]
    if loop._data_fetcher is not None and loop._data_fetcher.length is not None:
        loop._data_fetcher.length = updates
