"""What does one update cost, against the same loop written by hand?

In one process the rival is gradient accumulation as everyone writes it; in two (gloo) it is DistributedDataParallel
with `no_sync`. Both sides see the same tensors; ours also draws its indices from the sampler. Updates of the two
are interleaved, and each pair of blocks gives one ratio: ours / theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results import record, spread
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs

ROWS = 32
MODELS: dict[str, Callable[[], nn.Module]] = {
    "small CNN": lambda: nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    ),
    "10M parameters": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048),
        nn.ReLU(), nn.Linear(2048, 10),
    ),
}  # fmt: skip


def ours(make: Callable[[], nn.Module], microbatches: int, batches: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """One update by the library."""
    model, world = make(), vbs.backend.current_world()
    size = ROWS * microbatches * world.size
    sampler = vbs.CustomSampler(size * 1_000_000, size, world.size, world.rank, ROWS)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=128)
    indices = iter(sampler)

    def update() -> None:
        for images, labels in batches:
            next(indices)
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    return update


def by_hand(
    make: Callable[[], nn.Module], microbatches: int, batches: list[tuple[Tensor, Tensor]]
) -> Callable[[], None]:
    """One update as it is written without the library."""
    model = make()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)

    def update() -> None:
        for number, (images, labels) in enumerate(batches):
            waits = isinstance(model, DistributedDataParallel) and number < microbatches - 1
            with model.no_sync() if waits else contextlib.nullcontext():
                (nn.functional.cross_entropy(model(images), labels) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def ratios(name: str, microbatches: int, pairs: int) -> Iterator[float]:
    """Time of a block of our updates over that of the rival's, pair by pair."""
    torch.manual_seed(0)
    batches = [(torch.randn(ROWS, 1, 28, 28), torch.randint(10, (ROWS,))) for _ in range(microbatches)]
    sides = [side(MODELS[name], microbatches, batches) for side in (ours, by_hand)]
    block = max(1, (64 if name == "small CNN" else 8) // microbatches)
    for pair in range(-2, pairs):
        seconds = [0.0, 0.0]
        for side in (0, 1) if pair % 2 else (1, 0):
            if dist.is_initialized():
                dist.barrier()
            began = time.perf_counter()
            for _ in range(block):
                sides[side]()
            seconds[side] = time.perf_counter() - began
        if pair >= 0:
            yield seconds[0] / seconds[1]


def measure(rank: int, world: int, store: str, pairs: int) -> None:
    """All cases in one process of `world`."""
    if world > 1:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for name in MODELS:
        for microbatches in (1, 4, 16):
            answer = spread(list(ratios(name, microbatches, pairs)))
            if rank == 0:
                rival = "accumulation by hand" if world == 1 else "DistributedDataParallel, no_sync"
                record(f"time of an update, {name}, {world} x {microbatches} microbatches of {ROWS}, / {rival}", answer)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    flags = parser.parse_args()
    for world in flags.worlds:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world, f"{folder}/store", flags.pairs)
            if world == 1:
                measure(0, *arguments)
            else:
                mp.spawn(measure, arguments, nprocs=world)
