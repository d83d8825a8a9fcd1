"""Loaders for comparing plain batches with our microbatches: their sizes, and the order of our samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from helpers.yardstick import Samples
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


def loader(plain: bool, data: Any = None, kind: Callable[..., Any] = DataLoader, **options: Any) -> Any:
    """A loader of batches, or of our microbatches; not shuffled."""
    return kind(Samples() if data is None else data, **{"batch_size": BATCH if plain else ROWS, **options})


def named(rows: Any) -> dict[str, torch.Tensor]:
    """Collate a batch that is a dict."""
    return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}
