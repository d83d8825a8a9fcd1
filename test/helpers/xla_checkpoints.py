"""What the replicas of test_checkpoint.py run; here, because a child process has to import it."""

from __future__ import annotations

from pathlib import Path

import torch

import variable_batch_size as vbs
from helpers.xla_training import Case, Replica
from variable_batch_size.backend.xla import compiled_graphs


def save(folder: Path, case: Case, stop: int) -> None:
    """Train to the end and save after each update up to `stop`; what compiled for it, and the last weights.

    But for the first save nobody waits, and nobody closes: the last one is written while the training goes on.
    """
    replica, compiled, updates = Replica(case, noise="differenced"), [], 0
    checkpoint = vbs.Checkpoint(folder / "checkpoints", model=replica.model, optimizer=replica.optimizer)
    for updated in replica.turns():
        if updated:
            updates += 1
            if updates <= stop:
                replica.backend.barrier()
                before = compiled_graphs()
                replica.backend.barrier()
                checkpoint.save(wait=updates == 1)
                compiled.append(compiled_graphs() - before)
                replica.backend.barrier()
            if updates == len(case.sizes):
                break
    torch.save((compiled, replica.weights()), folder / f"unbroken{replica.backend.world.rank}.pt")


def restore(folder: Path, case: Case) -> None:
    """Train from the checkpoint to the end."""
    replica = Replica(case, noise="differenced")
    with vbs.Checkpoint(folder / "checkpoints", model=replica.model, optimizer=replica.optimizer) as checkpoint:
        restored = checkpoint.restore()
    stood = replica.optimizer.updates
    for _ in replica.turns():
        if replica.optimizer.updates == len(case.sizes):
            break
    torch.save((restored, stood, replica.weights()), folder / f"resumed{replica.backend.world.rank}.pt")


def train_until_asked(folder: Path, case: Case) -> None:
    """Go on from the checkpoint, if there is one, until a signal comes; each core tells where it stands at the end."""
    replica = Replica(case)
    rank = replica.backend.world.rank
    with vbs.Checkpoint(folder / "checkpoints", model=replica.model, optimizer=replica.optimizer) as checkpoint:
        checkpoint.restore()
        try:
            for updated in replica.turns():
                checkpoint.step()
                if updated and rank == 0:
                    print("update", replica.optimizer.updates, flush=True)
        finally:
            (folder / f"stood{rank}").write_text(str(replica.optimizer.updates))
