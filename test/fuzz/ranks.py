"""A world of threads whose all-reduce ends with an error, and never hangs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from variable_batch_size.backend import Backend, LocalBackend
from variable_batch_size.world import World

Result = TypeVar("Result")

TIMEOUT = 20.0  # seconds that a rank waits for the others


class Rendezvous:
    """What the ranks of a world share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.inputs: list[list[Tensor]] = [[] for _ in range(size)]  # by rank
        self.started: defaultdict[tuple[int, int], dict[int, Tensor]] = defaultdict(dict)  # by channel and number
        self.change = threading.Condition()

    def abort(self) -> None:
        self.barrier.abort()
        with self.change:
            self.change.notify_all()


class ThreadRank(Backend):
    """One rank: sums in the order of the ranks, and checks that all of them pass the same shapes."""

    overlaps = True

    def __init__(self, world: World, rendezvous: Rendezvous) -> None:
        super().__init__(world)
        self.rendezvous = rendezvous
        self.channels = 0

    def open_channel(self) -> ThreadChannel:
        self.channels += 1
        return ThreadChannel(self.world, self.channels, self.rendezvous)

    @torch.no_grad()
    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        self.rendezvous.inputs[self.world.rank] = list(tensors)
        self.rendezvous.barrier.wait()
        described = [[(one.shape, one.dtype) for one in own] for own in self.rendezvous.inputs]
        if any(one != described[0] for one in described):
            raise AssertionError(f"ranks reduce different tensors: {described}")
        sums = [torch.stack(summands).sum(0) for summands in zip(*self.rendezvous.inputs, strict=True)]
        self.rendezvous.barrier.wait()  # no rank overwrites its inputs while others read them
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(total)


@dataclass
class ThreadChannel:
    """Sums that are numbered; each checks that all ranks pass the same shape."""

    world: World
    number: int
    rendezvous: Rendezvous
    sums: int = 0

    def start_sum(self, flat: Tensor) -> Sum:
        self.sums += 1
        with self.rendezvous.change:
            self.rendezvous.started[self.number, self.sums][self.world.rank] = flat.detach().clone()
            self.rendezvous.change.notify_all()
        return Sum(flat, (self.number, self.sums), self)


@dataclass
class Sum:
    flat: Tensor
    key: tuple[int, int]
    channel: ThreadChannel

    @torch.no_grad()
    def wait(self) -> None:
        rendezvous, size = self.channel.rendezvous, self.channel.world.size
        with rendezvous.change:
            parts = rendezvous.started[self.key]
            rendezvous.change.wait_for(lambda: len(parts) == size or rendezvous.barrier.broken, TIMEOUT)
        if len(parts) < size:
            raise threading.BrokenBarrierError
        if len({(part.shape, part.dtype) for part in parts.values()}) > 1:
            raise AssertionError(f"ranks reduce different tensors: {parts}")
        self.flat.copy_(torch.stack([parts[rank] for rank in range(size)]).sum(0))


def run_world(train: Callable[[Backend], Result], size: int) -> list[Result]:
    """Run `train` on every rank; raise the first error that is not a consequence of another one."""
    if size == 1:
        return [train(LocalBackend())]
    rendezvous = Rendezvous(size)
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = train(ThreadRank(World(rank, size), rendezvous))
        except BaseException as error:
            if isinstance(error.__cause__ or error, threading.BrokenBarrierError):
                errors.append(error)
            else:
                errors.insert(0, error)
                rendezvous.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
