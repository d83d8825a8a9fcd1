"""Plain loaders of batches for comparison with our microbatches: their sizes, and the order of our samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from variable_batch_size.data.shuffle import order

BATCH, ROWS, SAMPLES = 16, 5, 96  # rows of a batch, and at most of a microbatch; an epoch has 6 updates


class Shuffled(Sampler[int]):
    """The order of our samples, for a plain loader of batches."""

    def __init__(self, number: int, seed: int = 0, *, shuffle: bool = True) -> None:
        self.number, self.seed, self.shuffle, self.epoch = number, seed, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        """Move to an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[int]:
        whole = np.arange(self.number)
        return iter(order(self.number, self.seed, self.epoch, self.shuffle)(whole).tolist())
