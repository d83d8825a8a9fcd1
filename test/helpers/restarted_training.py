"""The training of torchft_training.py under torchrun, with flags and journal as elastic_training.py has them."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import variable_batch_size as vbs
from helpers.torchft_training import ROWS, SAMPLES, loader_of, loss_of, network


def train(folder: Path, number: int, pause: float, save_every: float) -> None:
    """Train until the process ends; an update takes at least `pause` seconds, as on a device."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = network(0)
    trace = vbs.AdaptiveTrace(vbs.adaptive.PerDevice(8), every=None)
    sampler = vbs.CustomSampler(SAMPLES, trace, minibatch_size=ROWS)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=2e-3), sampler, 8)
    every = timedelta(seconds=save_every)
    checkpoint = vbs.Checkpoint(folder / "checkpoints", model=model, optimizer=optimizer, every=every, run="restarted")
    path = folder / f"journal-{number}.csv" if dist.get_rank() == 0 else Path(os.devnull)
    with vbs.Preemption(), checkpoint, path.open("w", buffering=1) as journal:
        checkpoint.restore()
        journal.write(f"{time.monotonic()},{optimizer.updates},{optimizer.samples}\n")
        while True:
            for update in vbs.updates(loader_of(optimizer), optimizer):
                for _, x, y in update:
                    optimizer.backward(loss_of(model, x, y))
                    optimizer.step()
                time.sleep(pause)
                journal.write(f"{time.monotonic()},{optimizer.updates},{optimizer.samples}\n")
                checkpoint.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--save-every", type=float, default=10.0)
    flags = parser.parse_args()
    train(flags.folder, flags.number, flags.pause, flags.save_every)
