"""A trainer's DataLoader, read by another batch sampler."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.settings import check_indexed

T = TypeVar("T")
_REPLACED = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}


def with_sampler(loader: DataLoader[T], sampler: CustomSampler) -> DataLoader[T]:
    """Return a loader of the same class and settings whose microbatches are those that `sampler` deals.

    Without a `generator` it gets one of its own, seeded in each iteration by the sampler's seed, epoch and update:
    otherwise it would draw the seed of its workers from torch's generator, so that dropout would differ after a resume.

    Raises:
        TypeError: if the dataset has no index.
    """
    check_indexed(loader.dataset)
    settings = {
        name: getattr(loader, name)
        for kind in type(loader).__mro__
        if "__init__" in vars(kind)
        for name in inspect.signature(vars(kind)["__init__"]).parameters
        if name not in {"self", *_REPLACED} and hasattr(loader, name)
    }
    kind: Any = type(loader)
    if settings.get("generator") is None:
        kind = _seeded(kind)
    if not loader._auto_collation:  # type: ignore[attr-defined]  # batch_size=None, whose collate_fn gets one sample
        del settings["collate_fn"]
    return kind(batch_sampler=sampler, **settings)


@cache
def _seeded(kind: Any) -> Any:
    """Return the class of loaders that draw from another generator in each iteration."""

    def iterate(self: Any) -> Iterator[Any]:
        sampler = self.batch_sampler
        position = sampler.due
        state = np.random.SeedSequence([sampler.seed, position.epoch, position.step]).generate_state(1, np.uint64)
        self.generator = torch.Generator().manual_seed(int(state[0]))
        return kind.__iter__(self)

    return type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__})
