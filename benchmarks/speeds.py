"""What does an update cost if one of two ranks is slower, with equal shares and with shares by speed?

Two gloo processes train a small model on this machine; for each row of a microbatch, the fast one waits for ROW
seconds more and the slow one for `--slower` times as long, in a sleep that keeps no core busy. The ideal is the time in
which both would finish together: the rows of a batch over the sum of their speeds, in rows a second, at which each
computes microbatches without sums. All three are measured in turns, and ratios are those of the same turn.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from records import spread
from results import record

WIDTH, ROW = 64, 5e-4  # of the model; seconds
EQUAL, BY_SPEED = "equal shares", "shares by speed"


class Side:
    """A training whose batches are dealt in one way."""

    def __init__(self, batch: int, rows: int, slower: float, speeds: tuple[float, ...] | None) -> None:
        rank = dist.get_rank()
        torch.manual_seed(0)
        self._model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)))
        self._x = torch.randn(16 * batch, WIDTH)
        sampler = vbs.CustomSampler(len(self._x), batch, minibatch_size=rows, speeds=speeds)
        inner = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._optimizer = vbs.ConstantOptimizer(inner, sampler, model=self._model)
        self._batch, self._rows = batch, rows
        self._sampler, self._wait = sampler, ROW * (slower if rank else 1)

    def epoch(self) -> float:
        """Train for an epoch of 16 updates; return the seconds of an update."""
        number = self._optimizer.epoch
        self._sampler.set_epoch(number)
        self._optimizer.set_epoch(number)
        dist.barrier()
        began = time.perf_counter()
        for indices in self._sampler:
            self._compute(self._x[indices])
            self._optimizer.step()
        dist.barrier()
        return (time.perf_counter() - began) / 16

    def ideal(self) -> float:
        """Return the seconds of an update of ranks that finish together and sum nothing; leaves no gradients."""
        dist.barrier()
        began, number = time.perf_counter(), 16
        with self._model.no_sync():
            for _ in range(number):
                self._compute(self._x[: self._rows])
        speed = torch.tensor(number * self._rows / (time.perf_counter() - began))  # rows a second
        self._optimizer.zero_grad()
        dist.all_reduce(speed)
        return self._batch / speed.item()

    def _compute(self, x: torch.Tensor) -> None:
        loss = mse_loss(self._model(x), x[:, :1])
        time.sleep(self._wait * len(x))
        loss.backward()


def processes(rank: int, store: str, batches: list[int], rows: int, slower: float, rounds: int) -> None:
    """Measure in this process, which is one of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for batch in batches:
        sides = {EQUAL: Side(batch, rows, slower, None), BY_SPEED: Side(batch, rows, slower, (slower, 1))}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        ideal: list[float] = []
        for number in range(rounds + 1):
            measured = [side.epoch() for side in sides.values()]
            best = sides[EQUAL].ideal()
            if number:  # the first round prepares
                ideal.append(best)
                for name, one in zip(sides, measured, strict=True):
                    seconds[name].append(one)
        if rank == 0:
            own = {
                "on": f"batch {batch}, microbatches of {rows}",
                "where": f"CPU, 2 processes, one {slower:g} times slower",
            }
            question = "time of an update with a slow rank"
            for name, found in seconds.items():
                record(question, name, spread([1e3 * one for one in found]), "ms", **own)
                pairs = zip(found, ideal, strict=True)
                record(question, f"{name} / ideal", spread([one / best for one, best in pairs]), **own)
            pairs = zip(seconds[BY_SPEED], seconds[EQUAL], strict=True)
            record(question, f"{BY_SPEED} / {EQUAL}", spread([one / other for one, other in pairs]), **own)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[100, 128, 512], help="samples of an update")
    parser.add_argument("--rows", type=int, default=32, help="the largest microbatch")
    parser.add_argument("--slower", type=float, default=3, help="times that a row takes longer on rank 1")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of 16 updates of each side")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = f"{folder}/store", flags.batches, flags.rows, flags.slower, flags.rounds
        mp.spawn(processes, given, nprocs=2)
