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
    if max_epochs is not None and max_epochs > 0:
        return min(plan.epoch(max(max_epochs - 1, plan.first_epoch)).end_step, limit)
    if plan.ends:
        *_, (last, _) = plan.epoch_runs(None)
        return min(last.end_step, limit)
    return limit


def set_epoch_length(trainer: Trainer, updates: int, *, passed: int | None = None) -> None:
    """Tell the loops of Lightning how many updates the epoch under way has.

    They read the length of a loader when they are given it, and again only if the user's hook returns a new loader.

    Args:
        trainer: the trainer.
        updates: number of updates of the epoch.
        passed: the number by which a restored epoch was over, if the loops have not yet noticed that it is.
    """
    loop = trainer.fit_loop
    loop.max_batches = updates if passed is None else min(updates, passed)
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(updates * trainer.val_check_interval))
    if (combined := loop._combined_loader) is not None:
        limit = trainer.limit_train_batches  # an int with fast_dev_run
        combined.limits = [min(updates, limit) if isinstance(limit, int) else updates]
        if isinstance(limit, int):
            loop.max_batches = min(loop.max_batches, limit)
    if (fetcher := loop._data_fetcher) is not None and fetcher.length is not None:
        fetcher.length = int(loop.max_batches) if passed is None else updates
