"""What do several ranks gain that write a checkpoint together, compared with rank 0 alone and with torch's own save?

Gloo processes on one machine train a multilayer perceptron. Three saves of the same state take turns: one of which
every rank writes a part, one of which rank 0 writes all, and `torch.distributed.checkpoint.async_save`, which divides a
state that all ranks have between them, too. One process has no ranks that could write together: its `save(wait=False)`
is compared with `async_save` alone.

The time that the call blocks rank 0 and the time until the checkpoint is published are measured; the second one of
`async_save` ends when its future is done, after `.metadata` is written. All flush their files to disk: torch's
`FileSystemWriter` does so by default (`sync_files=True`). The call of `async_save` includes the state dicts, because
`save` collects them, too. The time until it is published includes that in which the thread deletes an earlier
checkpoint. Disks and hosts of their own would only add to the gain of several ranks.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import permutations
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import variable_batch_size as vbs
from records import spread
from results import record
from resume import HIDDEN, build, is_there
from variable_batch_size.checkpoint import shards

TORCH = "torch.distributed.checkpoint.async_save with a caching stager"
BLOCKED, PUBLISHED = CASES = "time that it blocks rank 0", "time until it is published"


def process(rank: int, world: int, address: str, folder: str, size: str, repetitions: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    group = dist.new_group(backend="gloo")  # the thread of async_save communicates beside the training
    torch.manual_seed(0)
    training = build(size)
    vbs.broadcast_parameters(training.model)
    smallest = {"ranks together": shards.SMALLEST, "rank 0 alone": 1 << 62}  # bytes of the smallest shard
    if world == 1:
        smallest = {"save(wait=False)": shards.SMALLEST}
    checkpoints = {
        kind: vbs.Checkpoint(Path(folder) / kind, model=training.model, optimizer=training.optimizer, keep=1)
        for kind in smallest
    }
    # A DefaultStager keeps the memory of its copies if it is kept itself; that of an async_save without one is new each
    # time. All its options are off: pinned memory and copies that do not block need an accelerator, and shared memory
    # is for a process that writes. A thread that copies would not block the call, but the next update has to wait for
    # it. BlockingAsyncStager(cache_staged_state_dict=True), which has the same memory pinned, raises without CUDA.
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def save(kind: str) -> tuple[Path, Callable[[], bool]]:
        """Save, and return the path and whether the checkpoint is published."""
        shards.SMALLEST = smallest[kind]
        path = checkpoints[kind].save(wait=False)
        return Path(path), lambda: is_there(path)

    def save_by_torch() -> tuple[Path, Callable[[], bool]]:
        path = Path(folder) / "torch"
        pending = dcp.async_save(training.state(), checkpoint_id=path, async_stager=stager, process_group=group)
        assert isinstance(pending, Future)  # it is, of a stager without a thread
        return path, lambda: pending.done() and pending.result() is not None

    def wait_for_deletion() -> None:
        """Wait until torch's checkpoint is deleted; a `Checkpoint` deletes earlier ones at its next save."""
        dist.barrier()
        if rank == 0:
            shutil.rmtree(Path(folder) / "torch", ignore_errors=True)
        time.sleep(0.2)  # until the threads have ended

    saves: dict[str, Callable[[], tuple[Path, Callable[[], bool]]]] = {kind: partial(save, kind) for kind in smallest}
    saves[TORCH] = save_by_torch
    orders = [*permutations(saves)]
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    largest = dict.fromkeys(saves, 0)
    for repetition in range(-1, repetitions):  # -1 allocates the memory of the copies
        for kind in orders[repetition % len(orders)]:
            training.update()
            dist.barrier()
            began = time.perf_counter()
            path, published = saves[kind]()
            blocked = time.perf_counter() - began
            while not published():
                time.sleep(1e-3)
            if repetition >= 0:
                took[kind, BLOCKED].append(blocked)
                took[kind, PUBLISHED].append(time.perf_counter() - began)
            largest[kind] = max(file.stat().st_size for file in path.iterdir())
            wait_for_deletion()
    for checkpoint in checkpoints.values():
        checkpoint.close()
    stager.close()
    if rank == 0:
        write_records(took, largest, f"{size} parameters", f"CPU, {world} process{'es' if world > 1 else ''}")
    dist.destroy_process_group()


def write_records(took: dict[tuple[str, str], list[float]], largest: dict[str, int], on: str, where: str) -> None:
    """Record the ratios of the first kind of save to the others, and the measurements themselves.

    Args:
        took: seconds of each repetition, by kind and case.
        largest: bytes of the largest file, by kind, the first one first.
        on: see `record`.
        where: see `record`.
    """
    first, *others = largest
    for other in others:
        question, what = "cost of a save", f"{first} / {other}"
        for case in CASES:
            ratios = [own / its for own, its in zip(took[first, case], took[other, case], strict=True)]
            record(question, what, spread(ratios), on=on, where=where, case=case)
        record(question, what, largest[first] / largest[other], on=on, where=where, case="largest file")
    for kind in largest:
        for case in CASES:
            milliseconds = [1e3 * seconds for seconds in took[kind, case]]
            record("duration of a save", kind, spread(milliseconds), "ms", on=on, where=where, case=case)
        record("size of the largest file", kind, largest[kind] / 1e6, "MB", on=on, where=where)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=HIDDEN, default=list(HIDDEN))
    parser.add_argument("--worlds", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=11)
    flags = parser.parse_args()
    for size in flags.models:
        for world in flags.worlds:
            with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
                free.bind(("localhost", 0))
                address = f"tcp://localhost:{free.getsockname()[1]}"
                free.close()
                mp.spawn(process, (world, address, folder, size, flags.repetitions), nprocs=world)
