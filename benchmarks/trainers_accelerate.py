"""An update in Accelerate's loop with `prepare`, against Accelerate's own accumulation of the same microbatches."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from records import spread
from results import TRAINER, record
from step import kept, perceptron, ratios
from variable_batch_size.integrations.accelerate import prepare

ROWS, MICROBATCHES = 32, 4


def objects(width: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[torch.Tensor, ...]], StepLR]:
    """Return what an ordinary script has."""
    model = perceptron(width, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(64 * ROWS * MICROBATCHES, 784), torch.randint(10, (64 * ROWS * MICROBATCHES,)))
    return model, optimizer, DataLoader(data, ROWS, shuffle=True), StepLR(optimizer, 100)


def trained(width: int, *, plain: bool) -> Iterator[None]:
    """Train, and yield after each update, outside of which the settings of the process are those of the other side."""
    steps = MICROBATCHES if plain else 1
    accelerator = Accelerator(cpu=True)
    own = objects(width)
    if plain:
        model, optimizer, loader, scheduler = accelerator.prepare(*own)
    else:
        size = ROWS * MICROBATCHES
        model, optimizer, loader, scheduler = prepare(accelerator, *own, trace=size, rule="root", ref_batchsize=size)
    while True:
        for data, target in loader:
            accelerator.gradient_accumulation_steps = steps  # shared by all accelerators of a process
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(data), target))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                yield


def block(width: int, updates: int, *, plain: bool) -> Callable[[], None]:
    """Return a function that makes so many updates."""
    training = trained(width, plain=plain)
    return lambda: deque(islice(training, updates), maxlen=0) and None


def accelerate(pairs: int) -> None:
    """Measure the ratio of the times of an update, for models of two sizes."""
    for size, width, updates in ("1M parameters", 512, 16), ("10M parameters", 2800, 4):
        sides = block(width, updates, plain=False), block(width, updates, plain=True)
        found = spread(list(ratios(sides, 1, pairs, lambda: None)))
        record(TRAINER, "Accelerate / its accumulation", found, on=f"{size}{kept()}", where="CPU, 1 process, 1 thread")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of blocks per ratio")
    accelerate(parser.parse_args().pairs)
