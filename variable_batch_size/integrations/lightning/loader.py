"""The training's loader as Lightning sees it: an iterable without a length, whose items are updates.

Epochs have unequal numbers of updates. Lightning reads one item ahead of a loader without a length, which tells it the
last one of each epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from variable_batch_size._validation import value_error
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.from_loader import sampler_for
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.updates import Updates


@final
class UpdateLoader:
    """Yields the updates that are left of an epoch, as lists of this rank's microbatches.

    `ahead`: number of epochs that the trainer has counted more than the optimizers have trained.
    """

    def __init__(
        self, loader: DataLoader[Any], optimizers: Sequence[CustomOptimizer], trainer: Trainer, ahead: int
    ) -> None:
        self._loader, self._wrapped, self._lightning, self._ahead = loader, optimizers, trainer, ahead
        self.worker_init_fn = loader.worker_init_fn  # which `seed_everything(workers=True)` sets

    def __iter__(self) -> Iterator[list[Any]]:
        first, *others = self._wrapped
        if self._lightning.current_epoch - first.epoch > self._ahead:
            raise RuntimeError(
                f"an epoch must begin where the last one ends, but updates of epoch {first.epoch} are left; return no "
                f"-1 from on_train_batch_start, and set trainer.should_stop to end a training"
            )
        for optimizer in others:
            optimizer.set_epoch(first.epoch)
        self._loader.worker_init_fn = self.worker_init_fn
        return ([*update] for update in Updates(self._loader, first, ahead=1))


def training_sampler(loader: Any, settings: Settings, trainer: Trainer, world: Mapping[str, int]) -> CustomSampler:
    """Return the sampler of a training; a trace that ends, and says not how, has to last until that does."""
    seed = {} if "seed" in settings.sampler_options else {"seed": int(os.environ.get("PL_GLOBAL_SEED", "0"))}
    sampler = sampler_for(loader, settings, **seed, **world)
    plan, ends = sampler.plan, {"epochs": trainer.max_epochs or 0, "max_updates": trainer.max_steps}
    if plan.ends or plan.trace.steps is None or plan.trace.on_end != "error" or sampler.batches.decided is not None:
        return sampler
    if not any(end > 0 for end in ends.values()):
        remedy = 'pass max_steps to the Trainer, or sampler_options={"on_end": "stop"} to the strategy'
        raise value_error("a trace must last until the training ends", f"one of {len(plan.trace)} steps", remedy)
    ends = {name: end for name, end in ends.items() if end > 0}
    return sampler_for(loader, settings, **seed, **ends, **world)
