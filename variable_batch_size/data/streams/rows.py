"""Rows of a batch: tensors, arrays or lists whose first dimension is the rows, alone or in tuples, lists and dicts."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from variable_batch_size._validation import IntArray, type_error, value_error

Measure = Callable[[Any], "Sequence[int] | IntArray | Tensor"]


def _is_leaf(batch: object) -> bool:
    """Return whether a batch is one field, whose items are rows, and not a structure of several fields.

    A tuple, a dict, and a list with a tensor are structures, whose items are fields. A TensorDict is a dict, too, but
    has a batch size and is indexed by rows.
    """
    if isinstance(batch, list):  # a DataLoader turns samples that are tuples into a list of fields
        return not any(isinstance(item, (Tensor, np.ndarray)) for item in _flat_items(batch))
    if isinstance(batch, tuple) and batch and all(isinstance(item, str) for item in batch):
        return True  # a DataLoader collates strings into a tuple, whose items are rows
    return hasattr(batch, "batch_size") or not isinstance(batch, (tuple, Mapping))


def _flat_items(batch: object) -> Iterator[object]:
    """Yield the items of a list, and those of the lists in it; or the object itself, if it is no list."""
    if isinstance(batch, list):
        for item in batch:
            yield from _flat_items(item)
    else:
        yield batch


def _map_leaves(function: Callable[..., Any], *batches: Any) -> Any:
    """Return a batch of the same structure, with the result of `function(*fields)` in the place of each field.

    A field is a tensor, array or list whose items are rows. It is like `tree_map` of torch, but a list of rows is one
    field.

    Args:
        function: function of one field of each of the batches.
        *batches: batches of the same structure.
    """
    first = batches[0]
    if _is_leaf(first):
        return function(*batches)
    if isinstance(first, Mapping):
        if any(batch.keys() != first.keys() for batch in batches):
            names = sorted({name for batch in batches for name in batch})
            raise ValueError(f"{names} in some")  # `join_rows` completes the sentence
        fields = {name: _map_leaves(function, *(batch[name] for batch in batches)) for name in first}
        if not isinstance(first, MutableMapping):
            return type(first)(fields)  # type: ignore[call-arg]
        mapped = copy.copy(first)  # the constructor of a defaultdict, for example, takes no fields
        mapped.update(fields)
        return mapped
    values = [_map_leaves(function, *parts) for parts in zip(*batches, strict=True)]
    is_named_tuple = hasattr(first, "_fields")
    return type(first)(*values) if is_named_tuple else type(first)(values)


def leaves(batch: Any) -> list[Any]:
    """Return the fields of a batch, without the tuples and dicts that they are in."""
    fields = list[Any]()
    _map_leaves(fields.append, batch)
    return fields


def count_rows(batch: Any) -> int:
    """Return the number of rows of a batch; 0 for None.

    Raises:
        TypeError: if a field has no rows.
        ValueError: if the fields have unequal numbers of rows.
    """
    sizes = set[int]()
    for leaf in leaves(batch) if batch is not None else ():
        remedy = "pass tensors in tuples or dicts, or collate_fn= to ArrivingBatches"
        nested = [row for row in leaf if isinstance(row, (Mapping, tuple, list))] if isinstance(leaf, list) else []
        if nested:
            requirement = "a batch must have fields of rows, and a list of rows needs a collate_fn"
            raise type_error(requirement, nested[0], remedy)
        has_rows = hasattr(leaf, "__len__") and hasattr(leaf, "__getitem__") and getattr(leaf, "ndim", None) != 0
        if isinstance(leaf, str) or not has_rows:
            remedy = "pass tensors whose first dimension is the rows, in tuples or dicts, or a list and collate_fn="
            raise type_error("each field of a batch must have rows", leaf, remedy)
        sizes.add(len(leaf))
    if len(sizes) > 1:
        remedy = "pass tensors with one first dimension; or a list of rows, and collate_fn="
        raise value_error("all fields of a batch must have the same number of rows", f"{sorted(sizes)}", remedy)
    return max(sizes, default=0)


def is_list_of_rows(batch: Any) -> bool:
    """Return whether a batch is a list of rows, which are to be collated, and not a list of fields (tensors)."""
    return isinstance(batch, list) and _is_leaf(batch)


def has_tensor_rows(batch: Any, number: int) -> bool:
    """Return whether all fields of a batch are tensors with this number of rows, so that rows can be selected."""
    return all(isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == number for leaf in leaves(batch))


def join_rows(batches: Sequence[Any]) -> Any:
    """Return one batch with the rows of several batches, one after another.

    Raises:
        ValueError: if the batches have different fields, or fields of different shapes besides the number of rows.
    """

    def join(*fields: Any) -> Any:  # the same field of each batch
        """Return the rows of one field of several batches, one after another."""
        if isinstance(fields[0], (list, tuple)):
            return [row for field in fields for row in field]
        return np.concatenate(fields) if isinstance(fields[0], np.ndarray) else torch.cat(fields)

    try:
        return _map_leaves(join, *batches)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        requirement = "parts of a stream must have the same fields, of the same shape but for the rows"
        raise value_error(requirement, str(error), "yield lists of rows, and pass collate_fn=") from error


def take_rows(batch: Any, index: IntArray) -> Any:
    """Return some rows of a batch; if they are consecutive, tensors and arrays are not copied.

    Args:
        batch: a batch.
        index: the rows, (rows,).
    """
    is_consecutive = len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all()
    if is_consecutive:  # a slice is a view
        return _map_leaves(lambda field: field[int(index[0]) : int(index[-1]) + 1], batch)

    def take_from(field: Any) -> Any:
        """Return some rows of one field."""
        if isinstance(field, Tensor):
            return field[torch.from_numpy(index).to(field.device)]
        if isinstance(field, np.ndarray) or hasattr(field, "batch_size"):  # the latter: a TensorDict
            return field[index]
        return [field[row] for row in index.tolist()]

    return _map_leaves(take_from, batch)


def digest(value: Any) -> str:
    """Return a short hash, in hexadecimal, that is the same for equal rows or states; "" for what cannot be hashed.

    Ranks compare it to find out whether they read the same rows. Tensors on a GPU, for example, have none.
    """

    def plain(tensor: Tensor) -> Any:  # a pickled tensor would depend on its storage, and not only on its values
        return str(tensor.dtype), tensor.shape, tensor.detach().ravel().view(torch.uint8).numpy().tobytes()

    try:
        return hashlib.sha256(pickle.dumps(tree_map_only(Tensor, plain, value))).hexdigest()[:16]
    except Exception:  # rows may be any objects of the user, whose pickling may raise anything
        return ""


@final
class Layout:
    """How the rows of an item are counted, selected, joined and collated, by the arguments of `ArrivingBatches`."""

    def __init__(
        self, counts: Measure | None, key: Callable[[Any], str | int] | None, collate: Callable[[list[Any]], Any] | None
    ) -> None:
        """Store the user's functions: what each row counts, an item's name, and how rows become a microbatch."""
        self._counts, self._key, self._collate = counts, key, collate

    def counts_of(self, item: Any) -> IntArray:
        """Return what each row of an item counts in the batch size, such as its tokens with a label, (rows,).

        Without the user's function `counts` each row counts 1.
        """
        if self._collate is None:
            num_rows = count_rows(item)
        elif item is None or (isinstance(item, Sequence) and not isinstance(item, str)):
            num_rows = len(item or ())
        else:
            raise type_error("with collate_fn= each item must be a list of rows", item, "pass a list, or omit it")
        if self._counts is None or not num_rows:
            return np.ones(num_rows, dtype=np.int64)
        return checked_numbers("counts", self._counts(item), num_rows)

    def key_of(self, item: Any) -> str | int | None:
        """Return the name that the user's function `key` gives to an item, such as a rollout's number; or None.

        Ranks compare the names, to find out whether they have rows of the same item.
        """
        key = None if self._key is None or item is None else self._key(item)
        if not isinstance(key, (str, int, type(None))):
            raise type_error("key= must return a str or an int", key, "return the number of the rollout, or its name")
        return key

    def select(self, item: Any, index: IntArray) -> Any:
        """Return an item with some rows of an item; `index`: which rows, (rows,)."""
        return take_rows(item, index) if self._collate is None else [item[row] for row in index.tolist()]

    def join(self, items: Sequence[Any]) -> Any:
        """Return one item with the rows of several items; None for no item."""
        if len(items) < 2:
            return items[0] if items else None
        return join_rows(items) if self._collate is None else [row for item in items for row in item]

    def microbatch(self, item: Any, index: IntArray | None = None) -> Any:
        """Return some rows of an item, collated as the user wants it; `index`: which rows, (rows,), or None for all."""
        item = item if index is None else self.select(item, index)
        return item if self._collate is None else self._collate(item)


def checked_numbers(name: str, returned: Any, number: int) -> IntArray:
    """Return the numbers that a user's function has returned for each row, as an array, (rows,).

    Args:
        name: the name of the function, for the error.
        returned: what it has returned.
        number: number of rows.

    Raises:
        ValueError: if these are not integers >= 0, one for each row.
    """
    values = np.asarray(returned.cpu() if isinstance(returned, Tensor) else returned)
    if values.shape != (number,) or values.dtype.kind not in "iub" or (values < 0).any():
        found = f"{values.dtype} of shape {values.shape}" if values.shape != (number,) else f"{values.min()}"
        raise value_error(f"{name}= must return an integer >= 0 for each of {number} rows", found, "count its tokens")
    return values.astype(np.int64)
