"""The loader of a training, whose batches are updates: lists of this rank's microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.backend.generators import HostStates, kept_states, seed_host
from variable_batch_size.data.dataset.seeded import seed_of
from variable_batch_size.data.streams.arriving import ArrivingBatches
from variable_batch_size.integrations.loading import sampler_for, with_sampler
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.optim.loops.updates import updates


@final
class TrainerLoader:
    """The loader of a trainer: each iteration is an epoch, and each item an update, as a list of microbatches.

    Args:
        trainer: the `VariableBatchTrainer`.
        loader: the loader that Trainer would use.

    Attributes:
        sampler: chooses the samples of each microbatch.
        loader: reads these microbatches; the loader of Trainer itself if rows arrive in a stream.
    """

    def __init__(self, trainer: Any, loader: Any) -> None:
        """Create the sampler, or batches of a stream, and the loader that reads its microbatches."""
        loader = getattr(loader, "base_dataloader", loader)  # not Accelerate's, which distributes batches over ranks
        self.trainer, self._inside_epoch, args = trainer, False, trainer.args
        self._seed = args.seed if args.data_seed is None else args.data_seed
        self.sampler: Any = self._new_sampler(loader, trainer.settings, args)
        self.loader: Any = loader if self.sampler.batches.arriving else with_sampler(loader, self.sampler)

    def _new_sampler(self, loader: Any, settings: Settings, args: Any) -> Any:
        """Return the sampler of the training, or batches of a stream, which end where the training arguments say.

        Rows of a stream, and those that Trainer groups by length, have no index: each rank reads all of them, in the
        order of Trainer, and `ArrivingBatches` cuts them into updates.
        """
        world = {"num_replicas": args.world_size, "rank": args.process_index}
        dataset = self.trainer.train_dataset
        if isinstance(dataset, IterableDataset) or args.train_sampling_strategy == "group_by_length":
            if "lengths" in settings.sampler_options:
                found = "a stream" if isinstance(dataset, IterableDataset) else "group_by_length"
                remedy = "omit group_by_length, or pass max_steps and no lengths=, for batches in samples"
                raise value_error(
                    "lengths= needs a dataset with an index, whose order the sampler gives", found, remedy
                )
            cut = {"minibatch_size": args.per_device_train_batch_size, "collate_fn": loader.collate_fn}
            options = {**cut, **world, **settings.sampler_options}
            return ArrivingBatches(
                trace=settings.trace, streams=[UnreadRows(self.trainer, loader, self._seed)], **options
            )
        if isinstance(dataset, dict):
            remedy = "concatenate them, as datasets.concatenate_datasets does"
            raise type_error("train_dataset must be one dataset, not several by name", dataset, remedy)
        create: Any = partial(sampler_for, loader, seed=self._seed, **world)
        updates = args.max_steps if args.max_steps > 0 else create(settings).plan.updates_in(args.num_train_epochs)
        max_updates = min(updates, settings.sampler_options.get("max_updates", updates))
        return create(replace(settings, sampler_options={**settings.sampler_options, "max_updates": max_updates}))

    def __len__(self) -> int:
        """Return the number of updates of the epoch."""
        return self.sampler.plan.epoch(self.sampler.due.epoch).updates  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the updates of an epoch, each as a list of this rank's microbatches."""
        optimizer = self.trainer.variable_optimizer
        if self._inside_epoch:  # a callback has ended the epoch early: its other samples come now
            optimizer.discard_step()  # called on all ranks; it waits at most ten seconds for the others
        self._inside_epoch = True
        arriving = self.sampler.batches.arriving
        yield from map(list, updates(self.sampler if arriving else self.loader, optimizer))
        self._inside_epoch = False
        self.trainer.control.should_epoch_stop = True  # Trainer takes all epochs to be equally long


@final
class UnreadRows:
    """The rows of a trainer's stream, in lists, pass after pass without an end, but for those already trained on."""

    def __init__(self, trainer: Any, loader: Any, seed: int) -> None:
        self._trainer, self._loader, self._seed = trainer, loader, seed

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield lists of rows, from the first one that was not trained on; after the end the next pass begins."""
        to_skip = self._trainer.variable_optimizer.samples
        loader, dataset, order = self._loader, self._trainer.train_dataset, None
        if not isinstance(dataset, IterableDataset):  # group_by_length, whose sampler gives the order
            batches, dataset = loader.batch_sampler, loader.dataset
            order = getattr(batches, "batch_sampler", batches).sampler
        workers = {"num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor}
        lists_of_rows: Any = DataLoader(dataset, loader.batch_size or 1, sampler=order, collate_fn=list, **workers)
        for pass_number in count():
            if callable(set_epoch := getattr(dataset, "set_epoch", None)):
                set_epoch(pass_number)
            if order is not None:  # the same on all ranks
                order.generator = torch.Generator().manual_seed(self._seed + pass_number)
            for rows in self._read_pass(lists_of_rows, pass_number):
                if to_skip < len(rows):
                    yield rows[to_skip:]
                to_skip = max(0, to_skip - len(rows))

    def _read_pass(self, lists_of_rows: DataLoader[Any], number: int) -> Iterator[list[Any]]:
        """Yield the lists of rows of pass `number`, read with random numbers that depend on it and the seed alone.

        So all ranks, and a restored training, read the same rows. The training's own random numbers are not drawn.
        """
        with kept_states():
            seed_host(seed_of("sample", self._seed, number))
            iterator, states_of_pass = iter(lists_of_rows), HostStates.present()
        rows: list[Any] | None = []
        while rows is not None:
            with kept_states():
                states_of_pass.restore()
                rows = next(iterator, None)
                states_of_pass = HostStates.present()
            if rows is not None:
                yield rows
