"""What does an update cost with a controller, relative to the same training under the trace that it chooses?

Both sides are AdaScale, which measures the noise, with the same batches. The controller reads the noise, is asked every
8 updates, more often than by default, and chooses the batch size that there is. Blocks of updates are interleaved, as
in step.py.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import variable_batch_size as vbs
from results import CONTROLLED
from step import MODELS, adascale, compare, with_library
from variable_batch_size.backend import xla

SIDES = {CONTROLLED: (partial(with_library, "adascale", controlled=True), adascale)}
SMALL = {"small CNN": MODELS["small CNN"]}


def processes(rank: int, world: int, store: str, pairs: int) -> None:
    """Compare in this process, which is one of `world`."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    barrier = dist.barrier if world > 1 else (lambda: None)
    compare(SMALL, pairs, f"CPU, {world} process{'es' if world > 1 else ''}", SIDES, [1, 4], barrier=barrier)
    if world > 1:
        dist.destroy_process_group()


def cores(pairs: int) -> None:
    """Compare on this PyTorch/XLA core."""
    import torch_xla

    backend = vbs.backend.XlaBackend()
    where = f"XLA, {backend.world.size} core{'s' if backend.world.size > 1 else ''}"
    compare(SMALL, pairs, where, SIDES, [1, 4], barrier=backend.barrier, device=torch_xla.device())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=41, help="pairs of blocks per ratio")
    flags = parser.parse_args()
    for world in 1, 2:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(processes, (world, f"{folder}/store", flags.pairs), nprocs=world)
    for number in 1, 2:
        xla.launch(cores, (flags.pairs,), cores=number)
