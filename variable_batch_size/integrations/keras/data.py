"""What `fit` is given, as a torch DataLoader, and the epochs of updates that Keras reads in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, final

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.optim.loops.updates import updates


@final
class Arrays(Dataset[Any]):
    """Tensors with one row a sample, as a dataset whose microbatches are on the device of Keras."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return next(len(array) for array in keras.tree.flatten(self._data) if array is not None)

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the rows of a microbatch, as tensors on the device of Keras."""
        return map_arrays(lambda array: keras.ops.convert_to_tensor(array[indices]), self._data)


@final
class Epochs(IterableDataset[Any]):
    """What Keras reads: each iteration yields the updates of an epoch."""

    def __init__(self, loader: DataLoader[Any], optimizer: Any) -> None:
        self._updates = updates(loader, optimizer)
        self._optimizer = optimizer

    def __len__(self) -> int:
        """Return more than an epoch can have: Keras wants a number, and ends where the updates do."""
        return self._optimizer.sampler.plan.dataset_size + 1

    def __iter__(self) -> Iterator[Any]:
        return iter(self._updates)

    def next_epoch(self) -> int:
        """Return the number of the epoch that the next update belongs to, from which Keras then counts."""
        if self._optimizer.sampler.training.end_pending:  # restored after the last update of an epoch, before its end
            for _ in self._updates:  # there are none: it only comes to the end
                pass
        return self._optimizer.epoch

    @property
    def steps(self) -> int:
        """How many updates are left of the epoch, for callbacks such as the progress bar."""
        epoch = self._optimizer.sampler.plan.epoch(self._optimizer.epoch)
        return epoch.end_step - max(epoch.first_step, self._optimizer.updates)  # type: ignore[no-any-return]


def map_arrays(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply a function to each array within `data`, and leave None where there is none."""
    return keras.tree.map_structure(lambda array: None if array is None else function(array), data)


def pop_loader(arguments: dict[str, Any]) -> DataLoader[Any]:
    """Remove the training data from the arguments of `fit`, and return it as a DataLoader.

    As in Keras, `validation_split` is the share of samples, the last ones, that become `validation_data` instead.
    """
    x, y, sample_weight = arguments.pop("x"), arguments.pop("y"), arguments.pop("sample_weight")
    shuffle, validation_share = arguments.pop("shuffle"), arguments.pop("validation_split")
    if isinstance(x, DataLoader) and y is None and sample_weight is None:
        if validation_share and arguments["validation_data"] is None:
            remedy = "split its dataset, and pass validation_data="
            raise value_error("validation_split needs arrays", "a DataLoader", remedy)
        return x
    data = map_arrays(_to_tensor, keras.utils.pack_x_y_sample_weight(x, y, sample_weight))
    lengths = {len(array) for array in keras.tree.flatten(data) if array is not None}
    if len(lengths) != 1:
        raise value_error("all arrays must have the same number of samples", sorted(lengths), "pass a row for each")
    if validation_share and arguments["validation_data"] is None:
        end = int(lengths.pop() * (1 - validation_share))
        arguments["validation_data"] = map_arrays(itemgetter(slice(end, None)), data)
        data = map_arrays(itemgetter(slice(end)), data)
    return DataLoader(Arrays(data), arguments["batch_size"] or 32, shuffle, collate_fn=lambda rows: rows)


def _to_tensor(array: Any) -> torch.Tensor:
    """Return an array as a tensor, with floating-point numbers in the precision of `keras.config.floatx()`."""
    if not hasattr(array, "__array__"):
        requirement = "the data must have an index, because each rank is told which samples to read"
        raise type_error(requirement, array, "pass arrays, tensors or a DataLoader with a map-style dataset alone")
    tensor = array if isinstance(array, torch.Tensor) else torch.as_tensor(np.asarray(array))
    return tensor.to(getattr(torch, keras.config.floatx())) if tensor.is_floating_point() else tensor
