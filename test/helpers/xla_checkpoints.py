"""The functions that replicas of test_checkpoint.py and test_preemption.py run, in a module that a child can import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import variable_batch_size as vbs
from helpers.xla_graphs import quietly
from helpers.xla_training import Replica, XlaCase
from variable_batch_size.backend.xla import compiled_graphs


def save(backend: vbs.backend.Backend, folder: Path, case: XlaCase, stop: int) -> tuple[list[int], list[Any]]:
    """Train to the end, and save after each update up to `stop`.

    Return the graphs that each save compiled, and the final weights. Only the first save waits, and nothing closes the
    checkpoint: the last one is written while the training continues.
    """
    replica, compiled, updates = Replica(case, noise="differenced"), [], 0
    checkpoint = vbs.Checkpoint(folder / "checkpoints", model=replica.model, optimizer=replica.optimizer)
    for updated in replica.steps():
        if updated:
            updates += 1
            if updates <= stop:
                before = quietly(replica.backend, compiled_graphs)
                checkpoint.save(wait=updates == 1)
                compiled.append(compiled_graphs() - before)
                replica.backend.barrier()
            if updates == len(case.sizes):
                break
    return compiled, replica.weights()


def restore(backend: vbs.backend.Backend, folder: Path, case: XlaCase) -> tuple[bool, int, list[Any]]:
    """Train from the checkpoint to the end; return whether it restored, the updates then, and the final weights."""
    replica = Replica(case, noise="differenced")
    with vbs.Checkpoint(folder / "checkpoints", model=replica.model, optimizer=replica.optimizer) as checkpoint:
        restored = checkpoint.restore()
    updates = replica.optimizer.updates
    for _ in replica.steps():
        if replica.optimizer.updates == len(case.sizes):
            break
    return restored, updates, replica.weights()


def train_until_signal(folder: Path, case: XlaCase) -> None:
    """Train from the checkpoint, if there is one, until a signal arrives; rank r writes its updates to `updates<r>`."""
    replica = Replica(case)
    rank = replica.backend.world.rank
    with vbs.Checkpoint(folder / "checkpoints", model=replica.model, optimizer=replica.optimizer) as checkpoint:
        checkpoint.restore()
        try:
            for updated in replica.steps():
                checkpoint.step()
                if updated and rank == 0:
                    print("update", replica.optimizer.updates, flush=True)
        finally:
            (folder / f"updates{rank}").write_text(str(replica.optimizer.updates))
