"""The slow twin of how a step's batch is split into microbatches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def split_sizes(batch_size: int, minibatch_size: int, fixed_shape: bool = False, multiple_of: int = 1) -> list[int]:
    """The samples of each microbatch of a step, in the order of their numbers."""
    if not fixed_shape:
        number = -(-batch_size // minibatch_size)
        while number % multiple_of and number < batch_size:
            number += 1
        return [len(part) for part in np.array_split(np.arange(batch_size), number)][::-1]
    full, remainder = divmod(batch_size, minibatch_size)
    partial = []
    while remainder:
        partial.append(max(d for d in range(1, remainder + 1) if minibatch_size % d == 0))
        remainder -= partial[-1]
    return partial[::-1] + [minibatch_size] * full


def split_batch(batch: NDArray[np.int64], minibatch_size: int, fixed_shape: bool = False) -> list[NDArray[np.int64]]:
    """The microbatches of a batch of samples."""
    return np.split(batch, np.cumsum(split_sizes(len(batch), minibatch_size, fixed_shape))[:-1])


def rows_of(start: int, size: int, minibatch_size: int, fixed_shape: bool) -> list[int]:
    """The positions of the rows of a microbatch, each sample repeated to fill a fixed shape."""
    repeats = minibatch_size // size if fixed_shape else 1
    return np.repeat(np.arange(start, start + size), repeats).tolist()
