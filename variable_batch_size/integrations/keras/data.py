"""What `fit` is given, as a torch DataLoader: arrays, tensors, or a DataLoader with a map-style dataset."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, final

import keras
import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from variable_batch_size._validation import type_error, value_error


@final
class Arrays(Dataset[Any]):
    """Arrays with one row a sample, as a dataset whose microbatches are tensors on the device of Keras."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return next(len(array) for array in keras.tree.flatten(self._data) if array is not None)

    def __getitems__(self, indices: list[int]) -> Any:
        return map_arrays(lambda array: _tensor(array[np.asarray(indices)]), self._data)


def map_arrays(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply a function to each array within `data`, and leave None where there is none."""
    return keras.tree.map_structure(lambda array: None if array is None else function(array), data)


def loaders_of(parts: Any, size: int, shuffle: bool, held_out: float) -> tuple[Any, Any]:
    """Return a DataLoader in microbatches of `size` rows, unless `x` is one, and the `held_out` part, or None."""
    if isinstance(parts[0], DataLoader):
        if held_out or any(part is not None for part in parts[1:]):
            requirement = "a DataLoader must yield (x, y) or (x, y, sample_weight)"
            raise value_error(requirement, "others besides it", "let its dataset return them, and pass validation_data")
        return parts[0], None
    data = map_arrays(_array, keras.utils.pack_x_y_sample_weight(*parts))
    if len(lengths := {len(array) for array in keras.tree.flatten(data) if array is not None}) != 1:
        raise value_error("all arrays must have the same number of samples", sorted(lengths), "pass a row for each")
    end = int(lengths.pop() * (1 - held_out))
    own, after = (map_arrays(itemgetter(part), data) for part in (slice(end), slice(end, None)))
    return DataLoader(Arrays(own), size, shuffle=shuffle, collate_fn=lambda rows: rows), after if held_out else None


def first_microbatch(loader: DataLoader[Any], rows: int) -> Any:
    """Return the first samples of a dataset as a microbatch, whose shapes are those of others."""
    dataset: Any = loader.dataset
    reads = getattr(dataset, "__getitems__", lambda numbers: [dataset[number] for number in numbers])
    return loader.collate_fn(reads([*range(min(rows, len(dataset)))]))


def _array(value: Any) -> Any:
    if not isinstance(value, Tensor) and not hasattr(value, "__array__"):
        requirement = "the data must have an index, because each rank is told which samples to read"
        raise type_error(requirement, value, "pass arrays, tensors or a DataLoader with a map-style dataset")
    return value if isinstance(value, Tensor) else np.asarray(value)


def _tensor(rows: Any) -> Any:
    floating = rows.is_floating_point() if isinstance(rows, Tensor) else np.issubdtype(rows.dtype, np.floating)
    return keras.ops.convert_to_tensor(rows, dtype=keras.config.floatx() if floating else None)
