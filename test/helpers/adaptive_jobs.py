"""What the processes of test_adaptive_processes.py run, in a module that a child process can import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs

SAMPLES = 200
X = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + torch.sin(7 * X[:, 0])


def train(backend: vbs.backend.Backend, folder: Path, trace: Any, updates: int) -> Any:
    """Train up to so many updates in all, restored from the folder and saved to it; the world is detected.

    A tracker has a row for each update. Return the weights, the runs of the trace, and what was measured.
    """
    torch.manual_seed(2)
    model = nn.Linear(3, 1).double()
    sampler = vbs.CustomSampler(SAMPLES, trace, minibatch_size=4, seed=7, fixed_shape=False)
    loader = DataLoader(TensorDataset(X, Y), batch_sampler=sampler)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    tracker = vbs.Tracker(folder / "runs")
    optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=8, tracker=tracker, log_steps=1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scheduler = vbs.ProgressScheduler(cosine, optimizer, by="samples")
    metrics = vbs.Accumulator(optimizer)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "metrics": metrics}
    checkpoint = vbs.Checkpoint(folder / "checkpoints", **parts, every=7)
    checkpoint.restore()
    means: list[float] = []  # of the epochs that ended in this run, and of the one under way
    for _ in vbs.remaining_epochs(sampler, optimizer, until=100):
        for x, y in loader:
            loss = ((model(x)[:, 0] - y) ** 2).mean()
            loss.backward()
            metrics.add(loss=loss)
            if optimizer.step():
                scheduler.step()
                checkpoint.step()
                optimizer.zero_grad()
                if optimizer.updates == updates:
                    break
        if optimizer.updates == updates:
            break
        means.append(metrics.read()["loss"])
        metrics.reset()
    means.append(metrics.read()["loss"])
    checkpoint.save(wait=True)
    checkpoint.close()
    tracker.close()
    assert sampler.world == backend.world
    return model.state_dict(), [row.tolist() for row in sampler.trace.runs], [*means, scheduler.passed]
