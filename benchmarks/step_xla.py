"""What does an update on PyTorch/XLA cost, relative to a loop written by hand? What do AdaScale and logging add to it?

Both sides run under the library's launcher, with the same tensors, collective and inner optimizer. The loop by hand
executes one graph per microbatch and one for the update, as the library does; or the last two as one, which is only
possible if no rank has other pending operations than the others. Blocks of updates are interleaved, as in step.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import variable_batch_size as vbs
from step import LOGGING, MODELS, Batches, Make, adascale, compare, linear, memory, perceptron
from variable_batch_size.backend import xla


def by_hand(make: Make, batches: Batches, *, fused: bool = False) -> Callable[[], None]:
    """Return a function that makes one update without the library; `fused`: the last microbatch and the update."""
    import torch_xla

    backend = vbs.backend.XlaBackend()
    model = make().to(batches[0][0].device)
    vbs.broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    number = len(batches) * backend.world.size

    def update() -> None:
        for index, (images, labels) in enumerate(batches):
            (nn.functional.cross_entropy(model(images), labels) / number).backward()
            if not fused or index < len(batches) - 1:
                torch_xla.sync()
        backend.all_reduce_sum([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()

    return update


def cores(pairs: int, only: str) -> None:
    """Compare on this PyTorch/XLA core. `only`: what is in the names of the ratios to measure; "" for all."""
    import torch_xla

    backend = vbs.backend.XlaBackend()  # on a CPU, its step marker waits for the computation of this core
    sides = {
        "linear rule / accumulation by hand": (linear, by_hand),
        "linear rule / accumulation by hand in one graph less": (linear, partial(by_hand, fused=True)),
        "AdaScale / linear rule": (adascale, linear),
        **LOGGING,
    }
    sides = {name: pair for name, pair in sides.items() if only in name}
    models = {"small CNN": MODELS["small CNN"], "6M parameters": lambda: perceptron(2048, 1)}
    where = f"XLA, {backend.world.size} core{'s' if backend.world.size > 1 else ''}"
    compare(models, pairs, where, sides, [1, 4], barrier=backend.barrier, device=torch_xla.device())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21, help="pairs of blocks per ratio")
    parser.add_argument("--cores", type=int, nargs="*", default=[1, 2, 4], help="numbers of cores")
    parser.add_argument("--only", default="", help="measure the ratios with these words in their names, and no memory")
    flags = parser.parse_args()
    for number in flags.cores:
        xla.launch(cores, (flags.pairs, flags.only), cores=number)
    if not flags.only:
        memory(xla=True)
