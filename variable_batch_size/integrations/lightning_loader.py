"""The training's loader as Lightning sees it: each batch is an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from variable_batch_size.data.plan import Plan
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.lightning_counts import set_epoch_length
from variable_batch_size.optim.by_update import updates
from variable_batch_size.optim.optimizer import CustomOptimizer


@final
class Update(list[Any]):
    """This rank's microbatches of an update, as the loader yields them, on the host."""


@final
class LightningUpdates:
    """The updates of an epoch; a new iteration begins the next epoch, or continues after a restore.

    Other attributes are those of the DataLoader.

    Args:
        loader: the training's loader, with the sampler of the training as `batch_sampler`.
        trainer: the trainer that reads it.
        optimizers: function that returns the optimizers, which Lightning needs the loader to create.
    """

    def __init__(
        self, loader: DataLoader[Any], trainer: Trainer, optimizers: Callable[[], Sequence[CustomOptimizer]]
    ) -> None:
        self.loader = loader
        self._trainer, self._optimizers = trainer, optimizers
        self._restored = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def worker_init_fn(self) -> Any:
        """The function that workers call first; Lightning sets it with `seed_everything(workers=True)`."""
        return self.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self.loader.worker_init_fn = function

    @property
    def plan(self) -> Plan:
        """Which samples make up which update."""
        return self._sampler.plan

    @property
    def sampler(self) -> LightningUpdates:
        """This object: at the beginning of each epoch Lightning calls `set_epoch` of a loader's sampler."""
        return self

    @property
    def _sampler(self) -> CustomSampler:
        sampler = self.loader.batch_sampler
        assert isinstance(sampler, CustomSampler)
        return sampler

    def __len__(self) -> int:
        """Return the number of updates of the epoch under way, also of those before a restore."""
        epoch = self.plan.epoch(self._sampler.epoch)
        return epoch.end_step - epoch.first_step

    def set_epoch(self, epoch: int) -> None:
        """Move to the next epoch if Lightning has left one before its end; tell it the length of this one."""
        sampler, ready = self._sampler, self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        begins = sampler.clock.step == self.plan.epoch(sampler.epoch).first_step
        if not begins and not self._restored:  # on_train_batch_start has returned -1
            sampler.set_epoch(sampler.epoch + 1)
            for optimizer in self._optimizers():
                optimizer.set_epoch(sampler.epoch)
        passed = ready if self._restored and begins and ready else None
        set_epoch_length(self._trainer, len(self), passed=passed)
        self._restored = False

    def __iter__(self) -> Iterator[Update]:
        optimizers = self._optimizers()
        for optimizer in optimizers[1:]:
            optimizer.set_epoch(optimizers[0].epoch)
        by_update = updates(self.loader, optimizers[0])
        for microbatches in by_update:
            set_epoch_length(self._trainer, len(by_update))  # an adaptive trace may have changed it
            yield Update(microbatches)

    def after_restore(self) -> None:
        """Note that the optimizers are restored, and Lightning's loops are to be."""
        self._restored = True
        set_epoch_length(self._trainer, len(self))

    def check_position(self) -> None:
        """Check that Lightning and the optimizer are at the same update.

        Raises:
            RuntimeError: if not, as in a second `fit` without `ckpt_path`.
        """
        first = self._optimizers()[0]
        loop = self._trainer.fit_loop.epoch_loop
        made = loop.global_step if self._trainer.lightning_module.automatic_optimization else loop.total_batch_idx + 1
        if made != first.updates:
            raise RuntimeError(
                f"fit() must begin where the optimizer is in its trace, but the Trainer has made {made} updates and "
                f"the optimizer {first.updates}; create a new Trainer and strategy, and to continue pass ckpt_path"
            )

    # Lightning takes a loader with these methods for one that can resume within an epoch. The sampler's position is in
    # the state of the optimizer.

    def state_dict(self) -> dict[str, Any]:
        """Return no state: the position is saved with the optimizer."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accept the state."""
