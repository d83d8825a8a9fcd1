"""A training whose checkpoints several ranks write, for tests with threads and with processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from helpers.reference import Training, filled, training
from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint import shards

WIDTH = 200  # of the layers, two of which have WIDTH**2 weights


def wide(backend: Backend | None = None, width: int = WIDTH, **options: Any) -> Training:
    """Return a training with Adam."""
    hidden = nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
    model = filled(nn.Sequential(nn.Linear(3, width), nn.Tanh(), *hidden, nn.Linear(width, 2)).double())
    return training(vbs.RootRuleOptimizer, model=model, backend=backend, inner=torch.optim.Adam, **options)


@pytest.fixture
def always_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every rank write a shard of any size."""
    monkeypatch.setattr(shards, "SMALLEST", 1)
