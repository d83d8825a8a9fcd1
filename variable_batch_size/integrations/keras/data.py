"""What `fit` is given, as a torch DataLoader: arrays, tensors, or a DataLoader with a map-style dataset."""

from __future__ import annotations

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
        return len(keras.tree.flatten(self._data)[0])

    def __getitems__(self, indices: list[int]) -> Any:
        return keras.tree.map_structure(lambda array: _tensor(array[np.asarray(indices)]), self._data)


def loaders_of(parts: Any, size: int, shuffle: bool, held_out: float) -> tuple[Any, Any]:
    """Return a DataLoader in microbatches of `size` rows, unless `x` is one, and the `held_out` part, or None."""
    given = tuple(part for part in parts if part is not None)
    if isinstance(given[0], DataLoader):
        if len(given) > 1 or held_out:
            requirement = "a DataLoader must yield (x, y) or (x, y, sample_weight)"
            raise value_error(requirement, "others besides it", "let its dataset return them, and pass validation_data")
        return given[0], None
    data = keras.tree.map_structure(_array, given)
    if len(lengths := {len(array) for array in keras.tree.flatten(data)}) != 1:
        raise value_error("all arrays must have the same number of samples", sorted(lengths), "pass a row for each")
    end = int(lengths.pop() * (1 - held_out))
    own = Arrays(keras.tree.map_structure(lambda array: array[:end], data))
    after = keras.tree.map_structure(lambda array: array[end:], data)
    return DataLoader(own, size, shuffle=shuffle, collate_fn=lambda rows: rows), after if held_out else None


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
