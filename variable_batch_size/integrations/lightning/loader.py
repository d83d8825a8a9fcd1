"""The training's loader as Lightning sees it, whose items are updates.

It has no length: Lightning then reads one item ahead, and knows the last one of epochs of unequal lengths.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, final

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.loading import sampler_for
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.optim.loops.updates import Updates
from variable_batch_size.optim.optimizer import CustomOptimizer


@final
class StrategyLoader:
    """Yields the updates that are left of an epoch, as lists of this rank's microbatches.

    Attributes:
        rows: the DataLoader that reads them.
    """

    def __init__(self, loader: DataLoader[Any], wrapped: list[CustomOptimizer], trainer: Trainer, ahead: int) -> None:
        """Store the loader of microbatches, and the optimizers that it feeds."""
        self.rows, self._wrapped, self._lightning = loader, wrapped, trainer
        self._ahead = ahead  # how many epochs more than the optimizer Lightning has counted, see VariableBatch._reset
        self.worker_init_fn = loader.worker_init_fn  # which `seed_everything(workers=True)` sets

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the updates that are left of the epoch, each as a list of this rank's microbatches."""
        first, *others = self._wrapped
        if self._lightning.current_epoch - first.epoch > self._ahead:
            raise RuntimeError(
                f"an epoch must begin where the last one ends, but updates of epoch {first.epoch} are left; return no "
                f"-1 from on_train_batch_start, and set trainer.should_stop to end the run"
            )
        for optimizer in others:
            optimizer.set_epoch(first.epoch)
        self.rows.worker_init_fn = self.worker_init_fn
        return ([*update] for update in Updates(self.rows, first, ahead=1))


def training_sampler(loader: Any, settings: Settings, trainer: Trainer, world: Mapping[str, Any]) -> CustomSampler:
    """Return the sampler of a training, which ends with the Trainer if its trace must last until then.

    Only then its plan is told the numbers of epochs and updates, so that a trace that is too short raises at once.
    """
    arguments = {"seed": int(os.environ.get("PL_GLOBAL_SEED", "0")), **world}
    sampler = sampler_for(loader, settings, **arguments)
    trace = sampler.plan.trace
    must_last = trace.steps is not None and trace.on_end == "error" and sampler.batches.decided is None
    if sampler.plan.ends or not must_last:
        return sampler
    ends = {"epochs": trainer.max_epochs or 0, "max_updates": trainer.max_steps}
    return sampler_for(loader, settings, **arguments, **{name: end for name, end in ends.items() if end > 0})
