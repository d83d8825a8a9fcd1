"""Which share of the communication is hidden behind backward, beside that of DistributedDataParallel?

Two gloo processes train on this machine over a link that is slowed: a sum of n bytes takes n / RATE seconds longer, in
a thread, so that the processor is free. With T_0 for an update over the plain link, T for one over the slow link, and
S for the time by which its sums are slowed, the hidden share is 1 - (T - T_0) / S. Blocks of updates are interleaved.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from records import spread
from results import record
from step import BY_SIZE, by_hand, case, data, with_library

SIDES = {
    "linear rule in DDP": partial(with_library, "linear", by="ddp"),
    "linear rule": partial(with_library, "linear"),
    "AdaScale in DDP": partial(with_library, "adascale", by="ddp"),
}


class SlowLink:
    """Delays the end of each all-reduce, one after another, by its bytes; switched on by `rate`.

    Attributes:
        rate: bytes per second; None for the plain link.
        seconds: by which the sums were delayed so far.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self.seconds = 0.0
        self._link, self._all_reduce = ThreadPoolExecutor(1), dist.all_reduce
        dist.all_reduce = self.all_reduce

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        """Sum as torch does, and then wait."""
        work = self._all_reduce(tensor, op, group, async_op=True)
        result: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._link.submit(self._delay, work, tensor.nbytes).add_done_callback(lambda _: result.set_result([tensor]))
        return Slowed(result) if async_op else result.wait()

    def future(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Return the mean of a bucket of DistributedDataParallel, as its communication hook."""
        flat, result = bucket.buffer().div_(dist.get_world_size()), torch.futures.Future()
        work = self._all_reduce(flat, async_op=True)
        self._link.submit(self._delay, work, flat.nbytes).add_done_callback(lambda _: result.set_result(flat))
        return result

    def _delay(self, work: Any, size: int) -> None:
        work.wait()
        if self.rate is not None:
            time.sleep(size / self.rate)
            self.seconds += size / self.rate


class Slowed:
    """A sum that ends later."""

    def __init__(self, result: torch.futures.Future[list[Tensor]]) -> None:
        self._result = result

    def wait(self, timeout: object = None) -> None:
        """Wait for the end."""
        self._result.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return what has the sum at the end."""
        return self._result


def processes(rank: int, store: str, sizes: list[str], counts: list[int], rounds: int, rate: float) -> None:
    """Measure in this process, which is one of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    link = SlowLink()
    sides = {"DDP with no_sync": partial(by_hand, hook=link.future), **SIDES}
    for name, make in BY_SIZE.items():
        for microbatches in counts if name.split()[0] in sizes else ():
            batches = data(microbatches)
            updates = {side: create(make, batches) for side, create in sides.items()}
            for update in updates.values():
                for _ in range(3):
                    update()  # learns the order
            hidden: dict[str, list[float]] = {side: [] for side in updates}
            for _ in range(rounds):
                for side, update in updates.items():
                    plain, _ = timed(update, link, None)
                    slow, delay = timed(update, link, rate)
                    hidden[side].append(1 - (slow - plain) / delay)
            if rank == 0:
                for side, shares in hidden.items():
                    own = {"on": name, "where": f"CPU, 2 processes, {rate / 1e6:g} MB/s", "case": case(microbatches)}
                    record("share of the communication that is hidden", side, spread(shares), **own)
    dist.barrier()
    dist.destroy_process_group()


def timed(update: Any, link: SlowLink, rate: float | None) -> tuple[float, float]:
    """Return the seconds of an update, and those by which its sums were delayed."""
    dist.barrier()
    link.rate, link.seconds, began = rate, 0.0, time.perf_counter()
    update()
    seconds, link.rate = time.perf_counter() - began, None
    return seconds, link.seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each side")
    parser.add_argument("--sizes", nargs="*", default=["10M"], help="models: 1M, 10M, 100M")
    parser.add_argument("--microbatches", type=int, nargs="*", default=[1, 4], help="per update and rank")
    parser.add_argument("--rate", type=float, default=5e8, help="bytes per second of the slow link")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = f"{folder}/store", flags.sizes, flags.microbatches, flags.rounds, flags.rate
        mp.spawn(processes, given, nprocs=2)
