"""What `fit` is given, as a torch DataLoader: arrays, tensors, or a DataLoader with a map-style dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.integrations.keras.backend import keras

_NO_INDEX = "the data must have an index, because each rank is told which samples to read"


@final
class Arrays(Dataset[Any]):
    """Arrays with one row a sample, as a dataset whose microbatches are tensors on the device of Keras."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._length = len(keras.tree.flatten(data)[0])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Any:
        rows = np.asarray(indices)
        return keras.tree.map_structure(lambda array: _tensor(array[rows]), self._data)


def loader_of(
    x: Any, y: Any, sample_weight: Any, class_weight: Mapping[int, float] | None, size: int, *, shuffle: bool
) -> Any:
    """Return a DataLoader over what `fit` was given, in microbatches of `size` rows if it is not one itself.

    Raises:
        TypeError: if samples have no index, as in a generator, or belong to batches already, as in a PyDataset.
        ValueError: if arrays have different lengths, or an argument does not apply to a DataLoader.
    """
    if isinstance(x, DataLoader):
        given = {"y": y, "sample_weight": sample_weight, "class_weight": class_weight}
        if passed := [name for name, value in given.items() if value is not None]:
            raise value_error(
                "a DataLoader must yield (x, y) or (x, y, sample_weight)",
                f"{' and '.join(passed)} besides it",
                "let its dataset return them",
            )
        if x.batch_size is None:
            raise value_error(
                "a DataLoader must have a batch_size, the rows of a microbatch",
                "batch_size=None",
                "create it with batch_size=32 instead of a batch_sampler",
            )
        return x
    for kind, remedy in _REFUSED.items():
        if isinstance(x, kind):
            raise type_error(_NO_INDEX, x, remedy)
    if class_weight is not None:
        if sample_weight is not None or y is None:
            raise value_error("class_weight needs y, and no sample_weight", "others", "pass one of the weights")
        sample_weight = class_weights(y, class_weight)
    data = tuple(part for part in (x, y, sample_weight) if part is not None)
    if y is None and sample_weight is not None:
        raise value_error("sample_weight needs y", "none", "pass y, too")
    return DataLoader(Arrays(_arrays(data)), size, shuffle=shuffle, collate_fn=_whole)


def split(x: Any, y: Any, sample_weight: Any, part: float) -> tuple[tuple[Any, Any, Any], tuple[Any, ...]]:
    """Return the data of the training, and those of the validation: the last `part` of the samples.

    Raises:
        TypeError: if they are not arrays.
        ValueError: if `part` is not between 0 and 1.
    """
    if isinstance(x, (DataLoader, *_REFUSED)):
        raise type_error("validation_split needs arrays", x, "pass validation_data")
    data = _arrays((x, y, sample_weight))
    end = int(len(keras.tree.flatten(data)[0]) * (1 - part))
    if not 0 < part < 1 or end == 0:
        raise value_error("validation_split must be > 0 and < 1, and leave samples", part, "pass 0.2, for example")
    before = keras.tree.map_structure(lambda array: None if array is None else array[:end], data)
    after = keras.tree.map_structure(lambda array: None if array is None else array[end:], data)
    return before, tuple(after if sample_weight is not None else after[:2])


def class_weights(y: Any, weights: Mapping[int, float]) -> Any:
    """Return the weight of each sample, (samples,): that of its class, or 1.

    Args:
        y: classes, (samples,) or (samples, 1), or one-hot, (samples, classes).
        weights: class -> weight.
    """
    labels = np.asarray(y.cpu() if isinstance(y, Tensor) else y)
    if labels.ndim > 1:
        labels = labels[..., 0] if labels.shape[-1] == 1 else labels.argmax(-1)
    found = [float(weights.get(int(label), 1.0)) for label in np.round(labels)]
    return np.asarray(found, dtype=keras.config.floatx())


def first_rows(loader: Any, rows: int) -> Any:
    """Return a microbatch of the first samples, without an iteration over the loader."""
    dataset, indices = loader.dataset, list(range(min(rows, len(loader.dataset))))
    items = dataset.__getitems__(indices) if hasattr(dataset, "__getitems__") else [dataset[i] for i in indices]
    return loader.collate_fn(items)


def _arrays(data: Any) -> Any:
    """Return arrays or tensors, whose rows can be taken by an array of indices.

    Raises:
        TypeError: if a part is none.
        ValueError: if they have different numbers of rows.
    """
    found = keras.tree.map_structure(_array, data)
    lengths = {len(array) for array in keras.tree.flatten(found) if array is not None}
    if len(lengths) != 1:
        raise value_error(
            "all arrays must have the same number of samples", sorted(lengths), "pass a row for each sample"
        )
    return found


def _array(value: Any) -> Any:
    if value is None or isinstance(value, Tensor):
        return value
    if not hasattr(value, "__array__"):
        if isinstance(value, (int, float)):  # of a list, whose items are taken for arrays, as in Keras
            raise type_error("data must be arrays", value, "put np.asarray(...) around a list of numbers")
        raise type_error(_NO_INDEX, value, "pass arrays, tensors or a DataLoader with a map-style dataset")
    return np.asarray(value)


def _tensor(rows: Any) -> Any:
    floating = rows.is_floating_point() if isinstance(rows, Tensor) else np.issubdtype(rows.dtype, np.floating)
    return keras.ops.convert_to_tensor(rows, dtype=keras.config.floatx() if floating else None)


def _whole(rows: Any) -> Any:
    """Return the microbatch that `Arrays` has read at once."""
    return rows


_REFUSED: dict[type, str] = {
    keras.utils.PyDataset: "pass its arrays, or a DataLoader with a map-style dataset, instead of ready batches",
    Dataset: "put a torch.utils.data.DataLoader around it",
}
