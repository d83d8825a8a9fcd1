"""The training that test_kill.py and benchmarks/kill.py kill: run by torchrun, or alone for the cores of an XLA device.

It goes on from the newest checkpoint and has no end unless it is told to finish, so that whoever kills it hits a living
one. Every rank keeps a journal of what it counts, a file of its own: of a line that was cut off, nothing can follow it.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import variable_batch_size as vbs
from helpers.reference import Training, network, training
from variable_batch_size.backend.xla import launch


@dataclass(frozen=True)
class Run:
    """What is the same in all attempts at one training."""

    kind: str  # of the wrapper
    inner: str
    sizes: tuple[int, ...]  # of the trace, which is gone through again and again
    dataset_size: int
    seed: int
    every: int  # updates from one checkpoint to the next
    numbers: int  # in each checkpoint, beside the training's: they make a save take its time

    def start(self, minibatch_size: int, backend: vbs.Backend | None = None, device: Any = "cpu") -> Training:
        """The training before its first update."""
        run = training(
            getattr(vbs, self.kind),
            self.sizes,
            self.dataset_size,
            minibatch_size=minibatch_size,
            model=network().to(device),
            inner=getattr(torch.optim, self.inner),
            backend=backend,
            sampling={"seed": self.seed, "on_end": "cycle"},
        )
        run.x, run.target = run.x.to(device), run.target.to(device)
        return run


@dataclass(frozen=True)
class Attempt:
    """What one start of the training's processes is told."""

    number: int
    minibatch_size: int
    finish: bool  # at the end of the epoch after the one that it goes on in
    cores: int = 0  # of an XLA device; 0: torchrun has started this process


class Stamp:
    """A large part of a checkpoint that tells at which update each piece of it was made."""

    def __init__(self, optimizer: vbs.CustomOptimizer, numbers: int) -> None:
        self.optimizer, self.numbers = optimizer, numbers

    def state_dict(self) -> dict[str, Any]:
        return {"stamp": torch.full((self.numbers,), self.optimizer.updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        made = state["stamp"].unique().tolist()
        if made != [self.optimizer.updates]:
            raise ValueError(f"a checkpoint must be of one update, {self.optimizer.updates}, got pieces of {made}")


class Journal:
    """What one rank counts in one attempt, written before it happens."""

    def __init__(self, folder: Path, attempt: int, rank: int) -> None:
        self._file = os.open(journal(folder, attempt, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.note(pid=os.getpid())

    def note(self, **facts: Any) -> None:
        os.write(self._file, (json.dumps(facts) + "\n").encode())

    def count(self, optimizer: vbs.CustomOptimizer, rows: Sequence[int]) -> None:
        """The distinct samples of the microbatch that is due, which are none in a replay."""
        samples = sorted(set(rows)) if optimizer.microbatch.samples else []
        if len(samples) != optimizer.microbatch.samples:
            raise ValueError(f"{optimizer.microbatch} must count as many samples as are in {rows}")
        self.note(update=optimizer.updates + 1, epoch=optimizer.epoch, samples=samples)


def journal(folder: Path, attempt: int, rank: int | str) -> Path:
    return folder / f"journal-{attempt}-{rank}"


def train(folder: Path, run: Run, attempt: Attempt) -> None:
    """One rank's part of an attempt; its state after the last update is left in `end<rank>.pt`."""
    backend: vbs.Backend = vbs.XlaBackend() if attempt.cores else vbs.DistributedBackend()
    device = torch.device("xla" if attempt.cores else "cpu")
    notes = Journal(folder, attempt.number, backend.world.rank)
    now = run.start(attempt.minibatch_size, backend, device)
    stamp = Stamp(now.optimizer, run.numbers)
    with vbs.Checkpoint(
        folder / "checkpoints", model=now.model, optimizer=now.optimizer, every=run.every, stamp=stamp
    ) as checkpoint:
        checkpoint.restore()
        notes.note(restored=now.optimizer.updates)
        first = now.optimizer.epoch
        for epoch in range(first, first + 2) if attempt.finish else itertools.count(first):
            now.sampler.set_epoch(epoch)
            now.optimizer.set_epoch(epoch)
            for rows in now.sampler:
                now.loss(rows).backward()
                notes.count(now.optimizer, rows)
                now.optimizer.step()
                checkpoint.step()
    weights = [backend.host(parameter.detach()) for parameter in now.model.parameters()]
    torch.save((now.optimizer.updates, now.optimizer.progress, weights), folder / f"end{backend.world.rank}.pt")


def follow_starter() -> None:
    """End when nobody is left who would end us: then standard input ends."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main(folder: Path, run: Run, attempt: Attempt) -> None:
    faulthandler.enable()  # SIGABRT shows where a process hangs
    threading.Thread(target=follow_starter, daemon=True).start()
    with vbs.Preemption():
        if attempt.cores:
            launch(train, (folder, run, attempt), cores=attempt.cores)
            return
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        try:
            train(folder, run, attempt)
        finally:
            dist.destroy_process_group()  # gloo's threads end a process that leaves them behind, now and then


if __name__ == "__main__":
    run, attempt = map(json.loads, sys.argv[2:])
    main(Path(sys.argv[1]), Run(**run), Attempt(**attempt))
