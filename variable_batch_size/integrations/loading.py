"""A trainer's DataLoader, read by the batches of a trace: its sampler, and the loader around that."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sized
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.settings import Settings

T = TypeVar("T")
# Arguments of a DataLoader that its batch sampler replaces.
_REPLACED_ARGUMENTS = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}


def sampler_for(loader: DataLoader[Any], settings: Settings, **defaults: Any) -> CustomSampler:
    """Return a sampler for a loader's dataset, with the loader's order, `drop_last`, and batch as the microbatch.

    Args:
        loader: the loader that the user has passed to a trainer.
        settings: the trace, and the user's options of the sampler, which win over all others.
        **defaults: arguments of the sampler that the trainer determines, such as `rank`.

    Raises:
        TypeError: if `loader` is not a DataLoader, its dataset has no index, or its sampler chooses samples.
        ValueError: if its batch sampler chooses batches.
    """
    if not isinstance(loader, DataLoader):
        raise type_error("the training's loader must be a DataLoader", loader, "pass the loader of the training data")
    _check_is_indexed(loader.dataset)
    batches = _plain_batch_sampler(loader)
    sampler: Any = batches.sampler
    _check_reads_each_sample_once(sampler)
    shuffle = getattr(sampler, "shuffle", type(sampler) is not SequentialSampler)
    order = {"shuffle": shuffle, "drop_last": batches.drop_last}
    if "lengths" not in settings.sampler_options:
        order["minibatch_size"] = batches.batch_size
    dataset: Any = loader.dataset
    return CustomSampler(dataset, settings.trace, **{**order, **defaults, **settings.sampler_options})


def _check_is_indexed(dataset: Any) -> None:
    """Raise TypeError if a dataset is not map-style."""
    if isinstance(dataset, IterableDataset) or not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
        requirement = "the dataset must have an index, because each rank is told which samples to read"
        raise type_error(requirement, dataset, "pass a map-style dataset instead of an iterable one")


def _plain_batch_sampler(loader: DataLoader[Any]) -> BatchSampler:
    """Return the batch sampler of a loader; raise ValueError unless it cuts the order of samples as torch's does."""
    batches: Any = loader.batch_sampler
    batches = getattr(batches, "batch_sampler", batches)  # not Accelerate's, which distributes batches over ranks
    if not isinstance(batches, BatchSampler) or type(batches).__iter__.__qualname__ != "BatchSampler.__iter__":
        remedy = (
            "create it as DataLoader(dataset, batch_size=32, shuffle=True), for example; what chooses batches, such as "
            "NO_DUPLICATES and multi-dataset samplers of Sentence Transformers, cannot be used"
        )
        found = f"one with batch_sampler={type(batches).__name__}"
        raise value_error("the loader must have a batch_size, the rows of a microbatch", found, remedy)
    return batches


def _check_reads_each_sample_once(sampler: Any) -> None:
    """Raise TypeError if a sampler chooses samples, so that an epoch is not the whole dataset."""
    # A RandomSampler that draws all samples without replacement.
    is_whole = getattr(sampler, "replacement", True) is False and len(sampler) == len(sampler.data_source)
    # A DistributedSampler has only the share of a rank, but all ranks together have the whole dataset.
    if not is_whole and type(sampler) not in (SequentialSampler, DistributedSampler):
        requirement = "the loader must read each sample once an epoch, in order or with shuffle=True"
        remedy = "leave out sampler=, and put a choice of samples into the dataset, as torch.utils.data.Subset does"
        raise type_error(requirement, sampler, remedy)


def read_rows(dataset: Any, numbers: list[int]) -> Any:
    """Return rows of a dataset as a DataLoader reads them: together if the dataset can, otherwise one by one.

    Args:
        dataset: a map-style dataset.
        numbers: indices of the rows.
    """
    return dataset.__getitems__(numbers) if hasattr(dataset, "__getitems__") else [dataset[index] for index in numbers]


def with_sampler(loader: DataLoader[T], sampler: CustomSampler) -> DataLoader[T]:
    """Return a loader of the same class and settings that reads the microbatches which `sampler` chooses.

    Without a `generator` it gets one of its own, seeded in each iteration by the sampler's seed, epoch and update:
    otherwise it would draw the seed of its workers from torch's generator, so that dropout would differ after a resume.
    Raise ValueError if the dataset has another length than that of the sampler.
    """
    loader_class: Any = type(loader)
    dataset: Any = loader.dataset
    if len(dataset) != (size := sampler.batches.dataset_size):
        remedy = "pass the loader of this run, or start a new run"
        raise value_error(f"a run must continue with its {size} samples", len(dataset), remedy)
    # A subclass may take **options for its base: the arguments of all constructors are copied from the attributes.
    constructors = [base for base in loader_class.__mro__ if "__init__" in vars(base)]
    parameters = {name for base in constructors for name in inspect.signature(base).parameters}
    settings = {name: getattr(loader, name) for name in parameters - _REPLACED_ARGUMENTS if hasattr(loader, name)}
    if settings.get("generator") is None:
        loader_class = _seeded_class(loader_class)
    if not loader._auto_collation:  # type: ignore[attr-defined]  # batch_size=None, whose collate_fn gets one sample
        del settings["collate_fn"]
    return loader_class(batch_sampler=sampler, **settings)  # type: ignore[no-any-return]


@cache
def _seeded_class(loader_class: Any) -> Any:
    """Return a subclass of a DataLoader's class whose random numbers depend on the position in the training alone.

    In each iteration it draws the seed of its workers from a generator of its own, seeded by the sampler's seed, epoch
    and update, so that a run that resumes draws the same numbers.
    """

    def iterate(self: Any) -> Iterator[Any]:
        """Begin an iteration with a generator that is seeded by the position in the training."""
        sampler = self.batch_sampler
        seed = np.random.SeedSequence([sampler.seed, sampler.due.epoch, sampler.due.step]).generate_state(1, np.uint64)
        self.generator = torch.Generator().manual_seed(int(seed[0]))
        return loader_class.__iter__(self)

    return type(loader_class.__name__, (loader_class,), {"__iter__": iterate, "__module__": loader_class.__module__})
