"""What does an update cost with this library, with Accelerate and with Lightning Fabric, relative to a loop by hand?

All accumulate the same microbatches in one process on the CPU, in float32. Blocks of updates of each side and of the
loop by hand are interleaved, as in step.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

os.environ["USE_TORCH_XLA"] = "0"  # Accelerate would use it on the CPU, too

import torch
from accelerate import Accelerator
from lightning_fabric import Fabric
from torch import nn

from step import MODELS, Batches, Make, by_hand, compare, linear


def with_accelerate(make: Make, batches: Batches) -> Callable[[], None]:
    """Return a function that makes one update with Accelerate, as its guide to gradient accumulation does."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(batches))
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    model, optimizer = accelerator.prepare(model, inner)

    def update() -> None:
        for images, labels in batches:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()

    return update


def with_fabric(make: Make, batches: Batches) -> Callable[[], None]:
    """Return a function that makes one update with Lightning Fabric, as its guide to gradient accumulation does."""
    fabric = Fabric(accelerator="cpu", devices=1)
    model = make()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5))

    def update() -> None:
        for number, (images, labels) in enumerate(batches):
            with fabric.no_backward_sync(model, enabled=number < len(batches) - 1):
                fabric.backward(nn.functional.cross_entropy(model(images), labels) / len(batches))
        optimizer.step()
        optimizer.zero_grad()

    return update


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=41, help="pairs of blocks per ratio")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    alternatives = {"linear rule": linear, "Accelerate": with_accelerate, "Lightning Fabric": with_fabric}
    ratios = {f"{name} / accumulation by hand": (side, by_hand) for name, side in alternatives.items()}
    compare(MODELS, flags.pairs, "CPU, 1 process, 1 thread", ratios, [1, 4], barrier=lambda: None)
