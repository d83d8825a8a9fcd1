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
_REPLACED = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}


def sampler_for(loader: DataLoader[Any], settings: Settings, **others: Any) -> CustomSampler:
    """Return a sampler that shuffles and drops as `loader`, whose batch is the largest microbatch.

    `others` are arguments that the trainer determines, such as `rank`; `sampler_options` win over all.

    Raises:
        TypeError: if `loader` is not a DataLoader, its dataset has no index, or its sampler chooses samples.
        ValueError: if its batch sampler chooses batches.
    """
    if not isinstance(loader, DataLoader):
        raise type_error("the training's loader must be a DataLoader", loader, "pass the loader of the training data")
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
        requirement = "the dataset must have an index, because each rank is told which samples to read"
        raise type_error(requirement, dataset, "pass a map-style dataset instead of an iterable one")
    batches: Any = loader.batch_sampler
    batches = getattr(batches, "batch_sampler", batches)  # below Accelerate's, which deals batches to the ranks
    if not isinstance(batches, BatchSampler) or type(batches).__iter__.__qualname__ != "BatchSampler.__iter__":
        remedy = (
            "create it as DataLoader(dataset, batch_size=32, shuffle=True), for example; what chooses batches, such as "
            "NO_DUPLICATES and multi-dataset samplers of Sentence Transformers, cannot be used"
        )
        found = f"one with batch_sampler={type(batches).__name__}"
        raise value_error("the loader must have a batch_size, the rows of a microbatch", found, remedy)
    sampler: Any = batches.sampler
    whole = getattr(sampler, "replacement", True) is False and len(sampler) == len(sampler.data_source)
    if not whole and type(sampler) not in (SequentialSampler, DistributedSampler):  # whose shares are dealt here anyway
        requirement = "the loader must read each sample once an epoch, in order or with shuffle=True"
        remedy = "leave out sampler=, and put a choice of samples into the dataset, as torch.utils.data.Subset does"
        raise type_error(requirement, sampler, remedy)
    shuffle = getattr(sampler, "shuffle", type(sampler) is not SequentialSampler)
    order = {"shuffle": shuffle, "drop_last": batches.drop_last, "minibatch_size": batches.batch_size}
    return CustomSampler(dataset, settings.trace, **{**order, **others, **settings.sampler_options})


def with_sampler(loader: DataLoader[T], sampler: CustomSampler) -> DataLoader[T]:
    """Return a loader of the same class and settings whose microbatches are those that `sampler` deals.

    Without a `generator` it gets one of its own, seeded in each iteration by the sampler's seed, epoch and update:
    otherwise it would draw the seed of its workers from torch's generator, so that dropout would differ after a resume.

    Raises:
        ValueError: if the dataset has another length than that of the sampler.
    """
    kind: Any = type(loader)
    dataset: Any = loader.dataset
    if len(dataset) != (size := sampler.plan.dataset_size):
        remedy = "pass the loader of the training, or begin another one"
        raise value_error(f"a training continues with its {size} samples", len(dataset), remedy)
    names = {name for base in kind.__mro__ if "__init__" in vars(base) for name in inspect.signature(base).parameters}
    settings = {name: getattr(loader, name) for name in names - _REPLACED if hasattr(loader, name)}
    if settings.get("generator") is None:
        kind = _seeded(kind)
    if not loader._auto_collation:  # type: ignore[attr-defined]  # batch_size=None, whose collate_fn gets one sample
        del settings["collate_fn"]
    return kind(batch_sampler=sampler, **settings)  # type: ignore[no-any-return]


@cache
def _seeded(kind: Any) -> Any:
    """Return the class of loaders that draw from another generator in each iteration."""

    def iterate(self: Any) -> Iterator[Any]:
        sampler = self.batch_sampler
        seed = np.random.SeedSequence([sampler.seed, sampler.due.epoch, sampler.due.step]).generate_state(1, np.uint64)
        self.generator = torch.Generator().manual_seed(int(seed[0]))
        return kind.__iter__(self)

    return type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__})
