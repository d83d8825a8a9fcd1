"""The training's loader as Lightning sees it: each batch is an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, RandomSampler

from variable_batch_size.data.plan import Plan
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.lightning.counts import set_epoch_length
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.updates import updates


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
        self._unread = 0  # updates of the epoch that were not read

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
        epoch, epochs = self._sampler.epoch, self._sampler.epochs
        if epochs == epoch and self.plan.trace.on_end == "error":  # all are trained, and the trace may end with them
            epoch -= 1
        return self.plan.epoch(epoch).updates

    def set_epoch(self, epoch: int) -> None:
        """Tell Lightning the length of the epoch that begins or continues.

        Raises:
            RuntimeError: if Lightning has left the last one before its end.
        """
        if self._unread:
            raise RuntimeError(
                f"an epoch must be trained to its end, but {self._unread} of its updates were left out, as with an "
                f"on_train_batch_start that returns -1; set trainer.should_stop = True to end the training"
            )
        loop, sampler = self._trainer.fit_loop, self._sampler
        ended = sampler.clock.step == self.plan.epoch(sampler.epoch).first_step
        passed = loop.epoch_loop.batch_progress.current.ready
        if loop.restarting and ended and passed:
            set_epoch_length(self._trainer, passed)  # its loops have yet to find out that they are at its end
        else:
            set_epoch_length(self._trainer, len(self))

    def __iter__(self) -> Iterator[Update]:
        optimizers = self._optimizers()
        for optimizer in optimizers[1:]:
            optimizer.set_epoch(optimizers[0].epoch)
        by_update = updates(self.loader, optimizers[0])
        for microbatches in by_update:
            length = len(by_update)  # which an adaptive trace may have changed
            set_epoch_length(self._trainer, length)
            clock = self._sampler.clock
            self._unread = clock.epoch.end_step - clock.step - 1
            yield Update(microbatches)

    def after_restore(self) -> None:
        """Tell Lightning the length of the epoch, now that the optimizers are restored."""
        self._unread = 0
        set_epoch_length(self._trainer, len(self))
        loop, epoch = self._trainer.fit_loop, self._sampler.epoch
        if loop.epoch_progress.current.processed > epoch:  # max_steps has ended it, and Lightning takes it for complete
            for progress in loop.epoch_progress.current, loop.epoch_progress.total:
                progress.ready = progress.started = epoch + 1
                progress.processed = progress.completed = epoch
            loop.epoch_loop.batch_progress.is_last_batch = False
            loop.restarting = True

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


def own_random_numbers(loader: object) -> object:
    """Return the loader of an evaluation, which draws from a generator of its own.

    Otherwise each evaluation would draw from torch's generator. A run that resumes at the end of an epoch does not
    repeat the evaluation there, so its dropout would differ.
    """
    for drawing in (loader, getattr(loader, "sampler", None)):
        if isinstance(drawing, DataLoader | RandomSampler) and drawing.generator is None:
            drawing.generator = torch.Generator()
    return loader
