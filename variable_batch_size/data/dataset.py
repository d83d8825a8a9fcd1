"""The number of samples of a dataset, as users pass it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from variable_batch_size._validation import type_error


def number_of_samples(dataset: object) -> Any:
    """Return the length of a dataset; a number, or what is neither, as it is.

    Raises:
        TypeError: if it is a loader or a string, whose length is not a number of samples.
    """
    if isinstance(dataset, (DataLoader, str)):
        remedy = "pass an integer" if isinstance(dataset, str) else "pass loader.dataset"
        raise type_error("dataset_size must be a number of samples, or the dataset", dataset, remedy)
    is_number = isinstance(dataset, (Tensor, np.ndarray)) and dataset.ndim == 0
    return len(dataset) if isinstance(dataset, Sized) and not is_number else dataset
