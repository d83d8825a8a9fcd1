"""A loader whose batches are updates, for datasets without an index and orders that group by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from variable_batch_size._validation import value_error
from variable_batch_size.data.arriving import ArrivingBatches
from variable_batch_size.integrations.transformers.update_loader import Update
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.updates import updates


def is_stream(trainer: Any) -> bool:
    """Return whether the samples of a trainer come in an order of their own, and are not dealt by their index."""
    grouped = trainer.args.train_sampling_strategy == "group_by_length"
    return isinstance(trainer.train_dataset, IterableDataset) or grouped


def check_length(args: Any, source: ArrivingBatches) -> None:
    """Raise ValueError if a trace that must be long enough is not."""
    steps = source.trace.steps
    if steps is not None and source.trace.on_end == "error" and steps < args.max_steps:
        requirement = f"the trace must last until the training ends, after max_steps={args.max_steps}"
        raise value_error(requirement, f"one of {steps} steps", 'add steps, or pass a BatchTrace with on_end="hold"')


@final
class StreamLoader:
    """The training's loader, whose batches are updates, of a stream that passes over the dataset again and again.

    Every rank reads all samples, in the same order, and takes its part of each update. A training may go on in any
    world: it reads past the samples that were used before.

    Args:
        args: the training arguments.
        loader: that of the class below.
        source: function of a collator, which returns the batches that arrive, with `shared=True`.
        optimizer: function that returns the optimizer, or None before the training.
    """

    def __init__(
        self,
        args: Any,
        loader: DataLoader[Any],
        source: Callable[[Any], ArrivingBatches],
        optimizer: Callable[[], CustomOptimizer | None],
    ) -> None:
        dataset, batches = loader.dataset, loader.batch_sampler
        if type(dataset).__name__ == "IterableDatasetShard":  # accelerate's, which has a part of the samples
            dataset = dataset.dataset  # type: ignore[attr-defined]
        self._order: Any = None
        if not isinstance(dataset, IterableDataset):
            self._order = getattr(batches, "batch_sampler", batches).sampler  # type: ignore[union-attr]
        self.sampler, self._optimizer, self._args = source(loader.collate_fn), optimizer, args
        workers: Any = {"num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor}
        rows = self.sampler.plan.minibatch_size
        self.loader: DataLoader[Any] = DataLoader(dataset, rows, sampler=self._order, collate_fn=list, **workers)
        self._rows: Iterator[list[Any]] | None = None

    @property
    def dataset(self) -> Any:
        """The dataset."""
        return self.loader.dataset

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: passes are counted here, because a training may go on within one."""

    def __iter__(self) -> Iterator[Update]:
        optimizer = self._optimizer()
        if optimizer is None or optimizer.sampler is not self.sampler:
            return iter(())
        if self._rows is None:
            self._rows = self._read(optimizer.samples)
        return map(Update, updates(self._rows, optimizer))

    def _read(self, used: int) -> Iterator[list[Any]]:
        """Yield the samples of all passes, but for the first ones, which were used."""
        seed = self._args.seed if self._args.data_seed is None else self._args.data_seed
        for number in range(self._args.max_steps * self.sampler.trace.max_batch_size):  # at least one sample in a pass
            if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
                set_epoch(number)
            if hasattr(self._order, "generator"):  # the same on all ranks
                self._order.generator = torch.Generator().manual_seed(seed + number)
            for rows in self.loader:
                if used < len(rows):
                    yield rows[used:]
                used = max(0, used - len(rows))
