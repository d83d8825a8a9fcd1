"""Rows of a batch: tensors, arrays or lists whose first dimension is the rows, alone or in tuples, lists and dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from variable_batch_size._validation import IntArray, type_error, value_error


def _is_leaf(batch: object) -> bool:
    """Return whether the items of an object are rows; those of a tuple, a dict or a list with a tensor are fields.

    A TensorDict, which is a dict, has a batch size and is indexed by rows.
    """
    if isinstance(batch, list):  # a loader makes a list of the fields of tuples
        return not any(isinstance(item, (Tensor, np.ndarray)) for item in _flat_items(batch))
    if isinstance(batch, tuple) and batch and all(isinstance(item, str) for item in batch):
        return True  # as a loader collates strings
    return hasattr(batch, "batch_size") or not isinstance(batch, (tuple, Mapping))


def _map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return a batch of the same structure, with what a function returns for each field."""
    if _is_leaf(batch):
        return function(batch)
    if isinstance(batch, Mapping):
        return _mapping_like(batch, {name: _map_leaves(function, field) for name, field in batch.items()})
    fields = [_map_leaves(function, field) for field in batch]
    return type(batch)(*fields) if hasattr(batch, "_fields") else type(batch)(fields)


def _flat_items(batch: object) -> Iterator[object]:
    """Yield what is in a list, and in those within it."""
    if isinstance(batch, list):
        for item in batch:
            yield from _flat_items(item)
    else:
        yield batch


def _mapping_like(like: Mapping[str, Any], fields: dict[str, Any]) -> Any:
    """Return a mapping of the same type, such as a defaultdict, with other fields."""
    if isinstance(like, MutableMapping):
        made = copy.copy(like)
        made.update(fields)
        return made
    return type(like)(fields)  # type: ignore[call-arg]


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the fields of a batch, without the tuples and dicts that they are in."""
    if _is_leaf(batch):
        yield batch
    else:
        for field in batch.values() if isinstance(batch, Mapping) else batch:
            yield from leaves(field)


def count_rows(batch: Any) -> int:
    """Return the number of rows of a batch; 0 for None.

    Raises:
        TypeError: if a field has no rows.
        ValueError: if the fields have unequal numbers of rows.
    """
    if batch is None:
        return 0
    sizes = []
    for leaf in leaves(batch):
        remedy = "pass tensors in tuples or dicts, or collate_fn= to ArrivingBatches"
        nested = [row for row in leaf if isinstance(row, (Mapping, tuple, list))] if isinstance(leaf, list) else []
        if nested:
            requirement = "a batch must have fields of rows, and a list of rows needs a collate_fn"
            raise type_error(requirement, nested[0], remedy)
        if (
            isinstance(leaf, str)
            or not hasattr(leaf, "__len__")
            or not hasattr(leaf, "__getitem__")
            or getattr(leaf, "ndim", 1) == 0
        ):
            remedy = "pass tensors whose first dimension is the rows, in tuples or dicts, or a list and collate_fn="
            raise type_error("each field of a batch must have rows", leaf, remedy)
        sizes.append(len(leaf))
    if len(set(sizes)) > 1:
        remedy = "pass tensors with one first dimension; or a list of rows, and collate_fn="
        raise value_error("all fields of a batch must have the same number of rows", f"{sorted(set(sizes))}", remedy)
    return sizes[0] if sizes else 0


def is_list_of_rows(batch: Any) -> bool:
    """Return whether a batch is a list whose items are rows, to be collated, and not one of fields."""
    return isinstance(batch, list) and _is_leaf(batch)


def has_tensor_rows(batch: Any) -> bool:
    """Return whether all fields of a batch are tensors with the same number of rows, so that some can be taken."""
    sizes = {len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves(batch)}
    return len(sizes) == 1 and None not in sizes


def join_rows(batches: Sequence[Any]) -> Any:
    """Return the rows of several batches, one after another: one batch as it is.

    Raises:
        ValueError: if their fields differ, or the sizes of these besides the rows.
    """
    if len(batches) == 1:
        return batches[0]
    try:
        return _join_fields(batches)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise value_error(
            "parts of a stream must have the same fields, of the same shape but for the rows",
            str(error),
            "yield lists of rows, and pass collate_fn=",
        ) from error


def _join_fields(batches: Sequence[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Mapping) and not _is_leaf(first):
        if any(batch.keys() != first.keys() for batch in batches):
            raise ValueError(f"{sorted({name for batch in batches for name in batch})} in some")
        return _mapping_like(first, {name: _join_fields([batch[name] for batch in batches]) for name in first})
    if _is_leaf(first):
        if isinstance(first, (list, tuple)):
            return [row for batch in batches for row in batch]
        return np.concatenate(batches) if isinstance(first, np.ndarray) else torch.cat(list(batches))
    fields = [_join_fields(parts) for parts in zip(*batches, strict=True)]
    return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)


def take_rows(batch: Any, index: IntArray) -> Any:
    """Return these rows of a batch, (rows,): without a copy of tensors and arrays if they are consecutive."""
    if len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():
        return _map_leaves(lambda leaf: leaf[int(index[0]) : int(index[-1]) + 1], batch)

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[torch.from_numpy(index).to(leaf.device)]
        if isinstance(leaf, np.ndarray) or hasattr(leaf, "batch_size"):
            return leaf[index]
        return [leaf[number] for number in index.tolist()]

    return _map_leaves(of_leaf, batch)
