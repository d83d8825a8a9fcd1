"""An update in Accelerate's loop with `prepare`, against Accelerate's own accumulation of the same microbatches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from records import spread
from results import TRAINER, record
from variable_batch_size.integrations.accelerate import prepare

ROWS, MICROBATCHES = 32, 4


def objects(width: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[torch.Tensor, ...]], StepLR]:
    """Return what an ordinary script has."""
    model = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(64 * ROWS * MICROBATCHES, 784), torch.randint(10, (64 * ROWS * MICROBATCHES,)))
    return model, optimizer, DataLoader(data, ROWS, shuffle=True), StepLR(optimizer, 100)


def updates(width: int, *, plain: bool) -> Iterator[None]:
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


def accelerate(blocks: int = 60, updates_per_block: int = 16) -> None:
    """Measure the ratio of the times of an update, for models of two sizes."""
    for name, width in ("1M parameters", 512), ("10M parameters", 2800):
        sides = updates(width, plain=False), updates(width, plain=True)
        ratios = []
        for block in range(blocks + 2):
            seconds = []
            for side in sides:
                begin = time.perf_counter()
                list(islice(side, updates_per_block))
                seconds.append(time.perf_counter() - begin)
            if block >= 2:  # the first ones warm up
                ratios.append(seconds[0] / seconds[1])
        record(
            TRAINER,
            "Accelerate / its accumulation",
            spread(ratios),
            on=name,
            where="CPU, 1 process, 1 thread",
        )


if __name__ == "__main__":
    accelerate()
