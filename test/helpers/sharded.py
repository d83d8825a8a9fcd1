"""A training whose checkpoints several ranks write, for tests with threads and with processes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint
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


def stamp(run: Training) -> None:
    """Fill what the ranks share with the number of the update, so that parts of two updates are never mistaken."""
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    for tensor in (*run.model.parameters(), *states):
        tensor.detach().fill_(run.optimizer.updates)


def save_until_killed(folder: Path, rank: int, world_size: int) -> None:
    """Restore what was saved, and save after each update, alternately in a thread; log the updates."""
    shards.SMALLEST = 1
    signal.alarm(300)  # a rank that waits for one that was killed does not outlive the test
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    run = wide(vbs.backend.DistributedBackend())
    log = (folder / f"updates{rank}").open("w", buffering=1)
    with checkpoint(folder / "saved", run, every=1) as saves, log:
        saves.restore()
        while True:
            run.run(1)
            stamp(run)
            if run.optimizer.updates % 2:
                saves.save()
            else:
                saves.step()
            print(run.optimizer.updates, file=log)


if __name__ == "__main__":
    save_until_killed(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
