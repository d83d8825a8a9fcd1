"""The training's loader as Lightning sees it: each batch is an update."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, final

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from variable_batch_size._validation import value_error
from variable_batch_size.data.plan import Plan
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.from_loader import check_samples, sampler_for
from variable_batch_size.integrations.lightning.private import set_epoch_length
from variable_batch_size.integrations.loading import with_sampler
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.updates import Updates


@final
class Update:
    """What hooks get as `batch`: the rows of all microbatches of this process, on the host.

    They are joined when a hook looks at them: most never do, and a batch may be large.
    """

    def __init__(self, microbatches: list[Any]) -> None:
        self._microbatches = microbatches

    @cached_property
    def _rows(self) -> Any:
        return _join(self._microbatches)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # by which Lightning tells the batch size of a tensor, dict or list
        return type(self._microbatches[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def __getitem__(self, key: Any) -> Any:
        return self._rows[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _join(parts: list[Any], *, inside: bool = False) -> Any:
    """Return a batch of the rows of several ones; a list without a tensor, or within a batch, is one of rows."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        alike = len({part.shape[1:] for part in parts}) == 1  # not if each microbatch is padded to its longest row
        return (torch.cat(parts) if first.ndim else torch.stack(parts)) if alike else [*chain(*parts)]
    if isinstance(first, Mapping):
        return {key: _join([part[key] for part in parts], inside=True) for key in first}
    if not isinstance(first, list | tuple):
        return parts
    if inside or (isinstance(first, list) and not any(isinstance(each, Tensor) for each in first)):
        return [row for part in parts for row in part]
    columns = [_join([*column], inside=True) for column in zip(*parts, strict=True)]
    return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)


@final
class LightningUpdates:
    """The updates of an epoch; a new iteration begins the next epoch, or continues after a restore.

    Other attributes are those of the DataLoader.

    Args:
        loader: the training's loader, as the user has passed it.
        sampler: the sampler of the training.
        trainer: the trainer that reads it.
        optimizers: function that returns the optimizers, which Lightning needs the loader to create.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: CustomSampler,
        trainer: Trainer,
        optimizers: Callable[[], Sequence[CustomOptimizer]],
    ) -> None:
        self.own_sampler, self.batches = sampler, len(loader)
        self.microbatches: list[Any] = []  # of the update that was read last
        self._trainer, self._optimizers = trainer, optimizers
        self._unread = 0  # updates of the epoch that were not read
        self.sampler = self  # at the beginning of each epoch Lightning calls `set_epoch` of a loader's sampler
        self.reload(loader)

    def reload(self, loader: DataLoader[Any]) -> None:
        """Read another loader of the same samples, when Lightning asks for one again."""
        check_samples(loader, self.own_sampler)
        self.loader = with_sampler(loader, self.own_sampler)
        self.worker_init_fn = loader.worker_init_fn  # which `seed_everything(workers=True)` sets

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def plan(self) -> Plan:
        """Which samples make up which update."""
        return self.own_sampler.plan

    def __len__(self) -> int:
        """Return the number of updates of the epoch under way, also of those before a restore."""
        epoch, epochs = self.own_sampler.epoch, self.own_sampler.epochs
        if epochs == epoch and self.plan.trace.on_end == "error":  # all are trained, and the trace may end with them
            epoch -= 1
        return self.plan.epoch(epoch).updates

    def set_epoch(self, epoch: int) -> None:
        """Check that Lightning and the optimizer are at the same update, and tell Lightning the length of the epoch."""
        fit, sampler, first = self._trainer.fit_loop, self.own_sampler, self._optimizers()[0]
        loop, automatic = fit.epoch_loop, self._trainer.lightning_module.automatic_optimization
        made = loop.global_step if automatic else loop.total_batch_idx + 1
        if made != first.updates or self._unread:
            raise RuntimeError(
                f"an epoch must begin where the optimizer is, at the end of the last one, but the Trainer has made "
                f"{made} updates, the optimizer {first.updates}, and {self._unread} of the last epoch are left; create "
                f"a new Trainer and strategy, pass ckpt_path to continue, and set trainer.should_stop to end a training"
            )
        passed = loop.batch_progress.current.ready
        at_end = fit.restarting and passed and sampler.position.step == self.plan.epoch(sampler.epoch).first_step
        set_epoch_length(self._trainer, passed if at_end else len(self))  # its loops have yet to find out the end

    def __iter__(self) -> Iterator[Any]:
        optimizers = self._optimizers()
        self.loader.worker_init_fn = self.worker_init_fn
        for optimizer in optimizers[1:]:
            optimizer.set_epoch(optimizers[0].epoch)
        by_update = Updates(self.loader, optimizers[0])
        for microbatches in by_update:
            sampler = self.own_sampler
            self._unread = sampler.batches.epoch(sampler.due).end_step - sampler.position.step - 1
            set_epoch_length(self._trainer, len(by_update))  # which an adaptive trace may have changed
            self.microbatches = list(microbatches)
            yield _join(self.microbatches) if isinstance(self.microbatches[0], Tensor) else Update(self.microbatches)

    def after_restore(self) -> None:
        """Tell Lightning the length of the epoch, now that the optimizers are restored."""
        self._unread = 0
        set_epoch_length(self._trainer, len(self), restored=True)
        loop, epoch = self._trainer.fit_loop, self.own_sampler.epoch
        if loop.epoch_progress.current.processed > epoch:  # max_steps has ended it, and Lightning takes it for complete
            for progress in loop.epoch_progress.current, loop.epoch_progress.total:
                progress.ready = progress.started = epoch + 1
                progress.processed = progress.completed = epoch
            loop.epoch_loop.batch_progress.is_last_batch = False
            loop.restarting = True

    def state_dict(self) -> dict[str, Any]:
        """Return no state: it tells Lightning that an epoch can resume; the optimizers have the position."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accept the state."""


def training_sampler(loader: Any, settings: Settings, trainer: Trainer, world: Mapping[str, int]) -> CustomSampler:
    """Return the sampler of a training; a trace that ends, and says not how, has to last until that does."""
    seed = {} if "seed" in settings.sampler_options else {"seed": int(os.environ.get("PL_GLOBAL_SEED", "0"))}
    create = partial(sampler_for, loader, settings, **seed, **world)
    sampler = create()
    plan, ends = sampler.plan, {"epochs": trainer.max_epochs or 0, "max_updates": trainer.max_steps}
    if plan.ends or plan.trace.steps is None or plan.trace.on_end != "error" or sampler.batches.decided is not None:
        return sampler
    if not any(end > 0 for end in ends.values()):
        remedy = 'pass max_steps to the Trainer, or sampler_options={"on_end": "stop"} to the strategy'
        raise value_error("a trace must last until the training ends", f"one of {len(plan.trace)} steps", remedy)
    return create(**{name: end for name, end in ends.items() if end > 0})
