"""What the processes of test_parting_ranks.py run, in a module that a child process can import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint
from helpers.reference import Training, network, training

PART_AFTER = 20  # updates


def part(run: Training, saves: vbs.Checkpoint, metrics: vbs.Accumulator, how: str) -> bool:
    """Do on one rank what others do not, and return whether the loop is to go on in the next epoch."""
    group = run.optimizer.param_groups[0]
    if how in group:
        group[how] = group[how] / 2
    elif how == "leaves":
        raise SystemExit(0)
    elif how == "is signalled":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how.startswith("saves"):
        saves.save()
    elif how.startswith("adds a group"):
        run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    elif how == "loads alone":
        run.optimizer.load_state_dict(run.optimizer.state_dict())
    elif how == "reads metrics alone":
        metrics.read()
    elif how == "leaves before a save":
        raise SystemExit(0)
    return how in ("epoch", "loads alone")  # the loop ends


def loop(run: Training, saves: vbs.Checkpoint, metrics: vbs.Accumulator, how: str, *, odd: bool) -> None:
    for epoch in vbs.remaining_epochs(run.sampler, run.optimizer, until=5):
        for indices in run.sampler:
            loss = run.loss(indices)
            run.optimizer.backward(loss)
            metrics.add(loss=loss)
            if run.optimizer.step():
                saves.step()
                if run.optimizer.updates == PART_AFTER:
                    if odd:
                        if part(run, saves, metrics, how):
                            break
                    elif how == "saves":
                        metrics.read()
                    elif how == "leaves before a save":
                        saves.save()
                    elif how.endswith("late rank") and dist.get_rank() == 0:
                        time.sleep(3)  # it comes to the next sum when the others have ended
        assert epoch < 4, "the ranks have not heard that they differ"


def drift_at_the_end(run: Training, *, odd: bool) -> None:
    """Change a learning rate on one rank, two updates before the loop ends."""
    for indices in run.sampler:
        run.loss(indices).backward()
        if run.optimizer.step() and run.optimizer.updates == PART_AFTER - 2 and odd:
            run.optimizer.param_groups[0]["lr"] = 1e-4
        if run.optimizer.updates == PART_AFTER:
            break


def train(backend: vbs.backend.Backend, folder: Path, how: str) -> tuple[str, float, int]:
    """Train until an error ends it, after the last rank has parted from the others.

    Return the message of the error, the seconds and the updates.
    """
    began, message = time.monotonic(), ""
    try:
        with vbs.Preemption():
            samples = 8 * PART_AFTER if how == "before an epoch ends" else 40_000
            how, _, wrapper = how.partition(" in ")
            model = DistributedDataParallel(network()) if wrapper else network()
            run = training(
                vbs.ConstantOptimizer, [8], dataset_size=samples, hyperparameters={"lr": 1e-3, "weight_decay": 0.01},
                model=model, backend=backend,
            )  # fmt: skip
            odd = backend.world.rank == backend.world.size - 1
            if how == "before an epoch ends":
                drift_at_the_end(run, odd=odd)
                raise AssertionError("the ranks have not heard that they differ")
            with checkpoint(folder / "saved", run, every=10**6) as saves:
                if how.startswith("before"):
                    drift_at_the_end(run, odd=odd)
                else:
                    loop(run, saves, vbs.Accumulator(run.optimizer), how, odd=odd)
                if how == "before a save":
                    saves.save()
    except (RuntimeError, SystemExit) as error:
        message = str(error)
    return message, time.monotonic() - began, run.optimizer.updates
