"""What do several ranks gain that write a checkpoint together, compared with rank 0 alone?

Two gloo processes on one machine train a multilayer perceptron. The time that `save(wait=False)` blocks rank 0, and the
time until the checkpoint is published, are those of a save of which every rank writes a part, relative to a save of
which rank 0 writes all; the two alternate. Disks and hosts of their own would only add to the gain.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import variable_batch_size as vbs
from records import spread
from results import record
from resume import HIDDEN, build
from variable_batch_size.checkpoint import shards

KINDS = {"together": shards.SMALLEST, "alone": 1 << 62}  # bytes of the smallest shard


def process(rank: int, world: int, address: str, folder: str, size: str, repetitions: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    torch.manual_seed(0)
    training = build(size)
    vbs.broadcast_parameters(training.model)
    saves = {
        kind: vbs.Checkpoint(Path(folder) / kind, model=training.model, optimizer=training.optimizer, keep=1)
        for kind in KINDS
    }
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    largest: dict[str, int] = {}
    for repetition in range(-1, repetitions):  # -1 allocates the memory of the copies
        for kind in sorted(KINDS, reverse=repetition % 2 == 0):
            shards.SMALLEST = KINDS[kind]
            training.update()
            dist.barrier()
            began = time.perf_counter()
            path = saves[kind].save(wait=False)
            blocked = time.perf_counter() - began
            while not path.exists():
                time.sleep(1e-3)
            published = time.perf_counter() - began
            dist.barrier()
            if repetition >= 0:
                took[kind, "blocked"].append(blocked)
                took[kind, "published"].append(published)
                largest[kind] = max(file.stat().st_size for file in path.iterdir())
            time.sleep(0.2)  # until the previous checkpoint is deleted
    for checkpoint in saves.values():
        checkpoint.close()
    if rank == 0:
        own = {"on": f"{size} parameters", "where": f"CPU, {world} processes"}
        ratio = {"question": "cost of a save", "what": "ranks together / rank 0 alone", **own}
        for what, case in (("blocked", "time that it blocks rank 0"), ("published", "time until it is published")):
            together, alone = took["together", what], took["alone", what]
            ratios = [one / other for one, other in zip(together, alone, strict=True)]
            record(**ratio, case=case, measured=spread(ratios))
            for kind, seconds in (("ranks together", together), ("rank 0 alone", alone)):
                record("duration of a save", kind, spread([1e3 * second for second in seconds]), "ms", **own, case=case)
        record(**ratio, case="largest file", measured=largest["together"] / largest["alone"])
        for kind, what in (("ranks together", "together"), ("rank 0 alone", "alone")):
            record("size of the largest file", kind, largest[what] / 1e6, "MB", **own)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=HIDDEN, default=["100M"])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=11)
    flags = parser.parse_args()
    for size in flags.models:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"tcp://localhost:{free.getsockname()[1]}"
            free.close()
            mp.spawn(process, (flags.world, address, folder, size, flags.repetitions), nprocs=flags.world)
