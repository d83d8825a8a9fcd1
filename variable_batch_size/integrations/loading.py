"""A trainer's DataLoader, read by another batch sampler."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.settings import check_indexed

T = TypeVar("T")
_REPLACED = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}


def with_sampler(loader: DataLoader[T], sampler: CustomSampler) -> DataLoader[T]:
    """Return a loader of the same class and settings whose microbatches are those that `sampler` deals.

    Without a `generator` it gets one of its own: otherwise each iteration would draw a seed from torch's generator, so
    that dropout would differ after a resume.

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
    if settings.get("generator") is None:
        settings["generator"] = torch.Generator()
    if not loader._auto_collation:  # type: ignore[attr-defined]  # batch_size=None, whose collate_fn gets one sample
        del settings["collate_fn"]
    kind: Any = type(loader)
    return kind(batch_sampler=sampler, **settings)
