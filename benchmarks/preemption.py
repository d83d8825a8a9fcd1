"""What does it cost to check after each update whether all ranks stop here?

The time of an update with the `Checkpoint.step()` of a training that handles a `Preemption`, relative to the same
update alone. The model is the small CNN, whose updates are the shortest for which a stop is of use, with one
microbatch per rank.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import variable_batch_size as vbs
from records import spread
from results import record
from step import MODELS, ROWS, Batches, case, data, ratios

BLOCK = 100  # updates


def training(batches: Batches, folder: str | None) -> Callable[[], None]:
    """Return a function that makes one update; with a folder, the update includes `Checkpoint.step()`."""
    world, ((images, labels),) = vbs.backend.current_world(), batches
    model = MODELS["small CNN"]().to(images.device)
    vbs.broadcast_parameters(model)
    size = ROWS * world.size
    sampler = vbs.CustomSampler(size * 1_000_000, size, world.size, world.rank, ROWS)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), sampler, ref_batchsize=128)
    indices = iter(sampler)
    checkpoint = vbs.Checkpoint(folder, model=model, optimizer=optimizer) if folder else None

    def update() -> None:
        next(indices)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if checkpoint:
            checkpoint.step()

    return update


def compare(where: str, pairs: int, folder: str, barrier: Callable[[], object], device: torch.device | None) -> None:
    batches = data(1, device)
    found = list(ratios((training(batches, folder), training(batches, None)), BLOCK, pairs, barrier))
    if vbs.backend.current_world().rank == 0:
        own = {"on": "small CNN", "where": where, "case": case(1)}
        record("time of an update", "with / without Checkpoint.step()", spread(found), **own)


def process(rank: int, world: int, address: str, folder: str, pairs: int) -> None:
    torch.set_num_threads(1)
    with vbs.Preemption():
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
        compare(f"CPU, {world} processes", pairs, folder, dist.barrier, None)
        dist.destroy_process_group()


def core(folder: str, pairs: int) -> None:
    import torch_xla

    backend = vbs.backend.XlaBackend()
    compare(f"XLA, {backend.world.size} cores", pairs, folder, backend.barrier, torch_xla.device())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--xla", action="store_true", help="use PyTorch/XLA cores instead of processes")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if flags.xla:
            with vbs.Preemption():
                vbs.backend.xla.launch(core, (folder, flags.pairs), cores=flags.world)
        else:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                address = f"tcp://localhost:{free.getsockname()[1]}"  # a TCP store, as torchrun gives its workers
            mp.spawn(process, (flags.world, address, folder, flags.pairs), nprocs=flags.world)
