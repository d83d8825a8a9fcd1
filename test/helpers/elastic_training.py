"""A training of MNIST in double precision that writes down when it starts and when each update ends.

    torchrun --nproc-per-node=2 test/helpers/elastic_training.py runs/a --trace 1000

Rank 0 appends to a journal, a file for each start: `seconds,updates,samples` by the clock that all processes share, in
the first row those of the checkpoint. With --weights it writes the parameters at the end of the trace to that file.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers import mnist
from variable_batch_size.adaptive import PerDevice


def train(flags: argparse.Namespace) -> None:
    dataset = mnist.load(train=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, flags.width), nn.ReLU(), nn.Linear(flags.width, 10)).double()
    trace: vbs.BatchTrace | vbs.AdaptiveTrace = vbs.BatchTrace.of(flags.trace, on_end="stop")
    if flags.per_device is not None:
        trace = vbs.AdaptiveTrace(PerDevice(flags.per_device), every=None)
    sampler = vbs.CustomSampler(dataset, trace=trace, minibatch_size=flags.microbatch, max_updates=flags.updates)
    loader = DataLoader(dataset, batch_sampler=sampler)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=1024)
    every = timedelta(seconds=flags.save_every)
    checkpoint = vbs.Checkpoint(flags.folder / "checkpoints", model=model, optimizer=optimizer, every=every, keep=99)
    first = os.environ.get("RANK", "0") == "0"
    path = flags.folder / f"journal-{flags.number}.csv" if first else Path(os.devnull)
    with vbs.Preemption(), checkpoint, path.open("w", buffering=1) as journal:  # a row is complete, or not there
        checkpoint.restore()
        journal.write(f"{time.monotonic()},{optimizer.updates},{optimizer.samples}\n")
        for _ in vbs.remaining_epochs(sampler, optimizer):
            for images, labels in loader:
                nn.functional.cross_entropy(model(images.double()), labels).backward()
                if optimizer.step():
                    journal.write(f"{time.monotonic()},{optimizer.updates},{optimizer.samples}\n")
                checkpoint.step()
        checkpoint.save()
    if flags.weights and first:
        torch.save(model.state_dict(), flags.weights)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the checkpoints and of the journals")
    parser.add_argument("--trace", default="0:1024", help="a batch size, a schedule or a CSV file")
    parser.add_argument("--per-device", type=int, help="samples of an update that each process computes, instead")
    parser.add_argument("--updates", type=int, default=10**9, help="most updates")
    parser.add_argument("--number", type=int, default=0, help="number of this start")
    parser.add_argument("--microbatch", type=int, default=256)
    parser.add_argument("--width", type=int, default=1024, help="hidden units")
    parser.add_argument("--save-every", type=float, default=10.0, help="seconds between two checkpoints")
    parser.add_argument("--weights", type=Path)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(parser.parse_args())
    if dist.is_initialized():
        dist.destroy_process_group()
