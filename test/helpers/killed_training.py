"""The training that test_kill.py and benchmarks/kill.py kill: under torchrun, or in one process with XLA cores.

It resumes from the newest checkpoint and trains until it is killed, unless an attempt is to finish, so that no kill is
too late. Every rank writes its samples to a journal, which is a file of its own: a truncated line can only be the last.
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
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.reference import Training, network, training
from variable_batch_size.backend.xla import launch
from variable_batch_size.checkpoint import shards
from variable_batch_size.checkpoint.folder import Folder


@dataclass(frozen=True)
class KilledTraining:
    """The settings that all attempts at one training share."""

    kind: str  # class of the wrapper
    inner: str  # class of the inner optimizer
    sizes: tuple[int, ...]  # of the batch trace, which is cycled
    dataset_size: int
    seed: int
    every: int  # updates from one checkpoint to the next
    numbers: int  # in a further part of each checkpoint, which makes saves take longer
    location: str = ""  # a URL; by default the checkpoints are on the disk

    def folder(self, place: Path) -> Folder:
        """Return the checkpoints of a training whose journals are in a folder."""
        return Folder(self.location or place / "checkpoints")

    def start(
        self,
        minibatch_size: int,
        backend: vbs.backend.Backend | None = None,
        device: torch.device | None = None,
        by: str = "plain",
    ) -> Training:
        """Return the training before its first update."""
        model: Any = None
        if by != "plain":
            model = DistributedDataParallel(network()) if by == "ddp" else fully_shard(network())  # type: ignore[arg-type]
        return training(
            getattr(vbs, self.kind),
            self.sizes,
            dataset_size=self.dataset_size,
            minibatch_size=minibatch_size,
            inner=getattr(torch.optim, self.inner),
            backend=backend,
            model=model,
            sampling={"seed": self.seed, "on_end": "cycle"},
            device=device,
        )


@dataclass(frozen=True)
class Attempt:
    """The settings of one start of the training's processes."""

    number: int
    minibatch_size: int
    finish: bool  # at the end of the epoch after the one in which it resumes
    cores: int = 0  # XLA cores; 0: torchrun has started this process
    by: str = "plain"  # what sums: "plain", "ddp" or "fsdp"


class Stamp:
    """A large part of a checkpoint, each number of which is the update of the save."""

    def __init__(self, optimizer: vbs.CustomOptimizer, numbers: int) -> None:
        self.optimizer, self.numbers = optimizer, numbers

    def state_dict(self) -> dict[str, Any]:
        return {"stamp": torch.full((self.numbers,), self.optimizer.updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        updates = state["stamp"].unique().tolist()
        if updates != [self.optimizer.updates]:
            raise ValueError(f"a checkpoint must be of one update, {self.optimizer.updates}, got parts of {updates}")


class Journal:
    """The samples that one rank uses in one attempt, written before each `step()`."""

    def __init__(self, folder: Path, attempt: int, rank: int) -> None:
        self._file = os.open(journal_path(folder, attempt, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.write(pid=os.getpid())

    def write(self, **facts: Any) -> None:
        os.write(self._file, (json.dumps(facts) + "\n").encode())

    def write_microbatch(self, optimizer: vbs.CustomOptimizer, rows: Sequence[int]) -> None:
        """Write the distinct samples of the current microbatch, none for a replay."""
        samples = sorted(set(rows)) if optimizer.microbatch.samples else []
        if len(samples) != optimizer.microbatch.samples:
            raise ValueError(f"{optimizer.microbatch} must have as many samples as there are in {rows}")
        self.write(update=optimizer.updates + 1, epoch=optimizer.epoch, samples=samples)


def journal_path(folder: Path, attempt: int, rank: int | str) -> Path:
    return folder / f"journal-{attempt}-{rank}"


def train(folder: Path, run: KilledTraining, attempt: Attempt) -> None:
    """Train on one rank; it writes its state after the last update to `end<rank>.pt`."""
    backend: vbs.backend.Backend = vbs.backend.XlaBackend() if attempt.cores else vbs.backend.DistributedBackend()
    device = torch.device("xla" if attempt.cores else "cpu")
    journal = Journal(folder, attempt.number, backend.world.rank)
    resumed = run.start(attempt.minibatch_size, backend, device if attempt.cores else None, attempt.by)
    stamp = Stamp(resumed.optimizer, run.numbers)
    with vbs.Checkpoint(
        run.folder(folder).storage.location,
        model=resumed.model,
        optimizer=resumed.optimizer,
        every=run.every,
        run="killed",
        stamp=stamp,
    ) as checkpoint:
        checkpoint.restore()
        journal.write(restored=resumed.optimizer.updates)
        first = resumed.optimizer.epoch
        for epoch in range(first, first + 2) if attempt.finish else itertools.count(first):
            resumed.sampler.set_epoch(epoch)
            resumed.optimizer.set_epoch(epoch)
            for rows in resumed.sampler:
                resumed.optimizer.backward(resumed.loss(rows))
                journal.write_microbatch(resumed.optimizer, rows)
                resumed.optimizer.step()
                checkpoint.step()
    weights = [torch.from_numpy(weight) for weight in resumed.weights()]
    torch.save((resumed.optimizer.updates, resumed.optimizer.progress, weights), folder / f"end{backend.world.rank}.pt")


def exit_with_starter() -> None:
    """Exit when the process that started this one has ended: standard input is then closed."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main(folder: Path, run: KilledTraining, attempt: Attempt) -> None:
    faulthandler.enable()  # SIGABRT shows where a process hangs
    threading.Thread(target=exit_with_starter, daemon=True).start()
    with vbs.Preemption():
        if attempt.cores:
            launch(train, (folder, run, attempt), cores=attempt.cores)
            return
        torch.set_num_threads(1)
        shards.SMALLEST = 1  # bytes: every rank writes a part of each checkpoint
        dist.init_process_group("gloo")
        try:
            train(folder, run, attempt)
        finally:
            dist.destroy_process_group()  # else gloo's threads sometimes abort the process at exit


if __name__ == "__main__":
    run, attempt = map(json.loads, sys.argv[2:])
    main(Path(sys.argv[1]), KilledTraining(**run), Attempt(**attempt))
