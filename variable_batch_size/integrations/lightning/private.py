"""Every private name of Lightning that the strategies use, and what for; no other file here uses one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.nn import Module

from variable_batch_size.data.plan import Plan


class OneOrSeveral(DDPStrategy):
    """A DDPStrategy that trains on one process as on a device alone: without a process group."""

    def _configure_launcher(self) -> None:  # one process is not launched: it may be that of a notebook
        if self.world_size > 1:
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        """Connect the processes, if there are several."""
        if self.world_size > 1:
            super().setup_distributed()

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model, if there are several processes, and create the optimizers."""
        if self.world_size > 1:
            super().setup(trainer)
        else:
            Strategy.setup(self, trainer)

    def _setup_model(self, model: Module) -> Module:  # which wraps it
        return super()._setup_model(model) if self.world_size > 1 else model


def replace_loader(trainer: Trainer, replacement: Callable[[Any], Any]) -> None:
    """Let `trainer` train on what `replacement` returns of the user's loader.

    `fit_loop._data_source` returns that one. What `Strategy.process_dataloader` gets does not tell whether samples are
    shuffled: on several processes Lightning has given it a DistributedSampler, which always shuffles.
    """
    source = trainer.fit_loop._data_source
    source.dataloader = lambda: replacement(type(source).dataloader(source))


def set_epoch_length(trainer: Trainer, updates: int, *, restored: bool = False) -> None:
    """Set the number of updates of the epoch under way; `_data_fetcher.length` tells Lightning the last one.

    `restored`: the loader is iterated again, which Lightning 2.5 leaves out after its learning rate finder.
    """
    loop, interval = trainer.fit_loop, getattr(trainer, "val_check_interval", None)  # none if validations go by time
    if isinstance(trainer.limit_train_batches, int):  # with fast_dev_run
        updates = min(updates, trainer.limit_train_batches)
    loop.max_batches = updates
    if isinstance(interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(updates * interval))
    if restored and loop._data_fetcher is not None:
        iter(loop._data_fetcher)
    if loop._data_fetcher is not None and loop._data_fetcher.length is not None:
        loop._data_fetcher.length = updates


def count_updates(trainer: Trainer, plan: Callable[[], Plan | None]) -> None:
    """Let `trainer.estimated_stepping_batches`, the length of schedules, be the number of updates of a plan.

    Lightning takes all epochs to be as long as the first one. It is a property of the class, which no object can have
    otherwise, so that the trainer becomes an object of a subclass, by `__class__`.
    """
    kind = type(trainer)

    def estimated_stepping_batches(self: Trainer) -> int | float:
        if self.train_dataloader is None:
            self.fit_loop.setup_data()
        found = plan()
        if found is None:
            return kind.estimated_stepping_batches.fget(self)  # type: ignore[attr-defined]
        return _total(found, self.max_epochs, self.max_steps)

    own = {"estimated_stepping_batches": property(estimated_stepping_batches), "__module__": kind.__module__}
    trainer.__class__ = type(kind.__name__, (kind,), own)


def _total(plan: Plan, max_epochs: int | None, max_steps: int) -> int | float:
    limit = math.inf if max_steps == -1 else max_steps
    if max_epochs is not None and max_epochs >= 0:  # for 0, that of one epoch, as in Lightning
        return min(plan.epoch(max(max_epochs - 1, plan.first_epoch)).end_step, limit)
    if plan.ends:
        *_, (last, _) = plan.epoch_runs(None)
        return min(last.end_step, limit)
    return limit
