"""A training with an accumulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import variable_batch_size as vbs
from helpers.reference import SIZES, training

VALUES = np.random.default_rng(3).normal(5, 2, size=1000)  # (samples,)
HITS = VALUES > 5  # (samples,)


class Measured:
    def __init__(self, sizes: Sequence[int] = SIZES, dataset_size: int = 50, **options: Any) -> None:
        self.training = training(vbs.ConstantOptimizer, sizes, dataset_size=dataset_size, **options)
        self.optimizer = self.training.optimizer
        self.metrics = vbs.Accumulator(self.optimizer)

    def microbatch(self, indices: list[int]) -> bool:
        """Add the values of one microbatch and step; return whether the weights changed."""
        run = self.training
        self.metrics.add(value=torch.from_numpy(VALUES[indices]).mean(), hit=float(HITS[indices].mean()))
        run.loss(indices).backward()
        return run.optimizer.step()

    def run(self, updates: int) -> Measured:
        """Train for `updates` more updates, over as many epochs as needed."""
        for indices in self.training.microbatches(self.optimizer.updates + updates):
            self.microbatch(indices)
        return self
