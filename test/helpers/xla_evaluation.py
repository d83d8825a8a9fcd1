"""The function that the XLA cores of test_metrics_xla.py run, in a module that a child process can import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import variable_batch_size as vbs
from helpers.xla_training import counters


def evaluate(folder: Path, minibatch_size: int, first: int, second: int) -> None:
    """Evaluate the numbers 0 .. `first` - 1 and then 0 .. `second` - 1: means on the device, and then on the host.

    Rank r writes the four results to `means<r>.pt`, with the compilations and transfers within the batches of the
    second evaluation, and the compilations of its read.
    """
    import torch_xla
    import torch_xla.debug.metrics as met

    backend, device = vbs.backend.XlaBackend(), torch_xla.device()
    found, counts = [], []

    def count() -> None:
        backend.barrier()
        counts.append(counters(met))
        backend.barrier()

    for on_device in (True, False):
        for n in (first, second):
            sampler = vbs.EvaluationSampler(n, minibatch_size=minibatch_size)
            metrics = vbs.Accumulator(sampler)
            count()
            for indices in sampler:
                numbers = torch.tensor(indices).float()
                mean: Any = numbers.to(device).mean() if on_device else numbers.mean().item()
                metrics.add(value=mean, double=2 * mean)
            count()
            found.append(metrics.read())
    begun, ended, read = counts[2:5]
    batches = {name: ended[name] - begun.get(name, 0) for name in ended}
    torch.save((found, batches, read["compiled"] - ended["compiled"]), folder / f"means{backend.world.rank}.pt")
