"""Helpers for testing a training: a world of any size inside one process, and several XLA cores on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, final

from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.backend.xla import launch
from variable_batch_size.world import World

__all__ = ["ThreadBackend", "launch", "run_ranks"]

Result = TypeVar("Result")

_PATIENCE = 60.0  # seconds that a rank waits for the others


@final
class ThreadBackend(Backend):
    """One of several ranks that are threads of this process; sums are taken in the order of the ranks.

    `collectives` counts the calls of `all_reduce_sum`.
    """

    def __init__(self, world: World, meeting: _Meeting) -> None:
        super().__init__(world)
        self._meeting = meeting
        self.collectives = 0

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Waits for all ranks, for a minute."""
        self.collectives += 1
        sums = self._meeting.exchange(self.world.rank, [tensor.detach() for tensor in tensors])
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.detach().copy_(total)


@final
class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self._slots: list[Sequence[Tensor]] = [()] * size

    def exchange(self, rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._slots[rank] = tensors
        self.barrier.wait()
        sums = [sum(parts[1:], start=parts[0].clone()) for parts in zip(*self._slots, strict=True)]
        self.barrier.wait()  # nobody writes its sums over what others still read
        return sums


def run_ranks(train: Callable[[Backend], Result], size: int) -> list[Result]:
    """Run `train(backend)` on `size` ranks, each a thread, and return their results by rank.

    Raises:
        Exception: the first one that a rank raised; the other ranks are then released.
    """
    meeting = _Meeting(size)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = train(ThreadBackend(World(rank, size), meeting))
        except threading.BrokenBarrierError:
            errors.append(
                RuntimeError(
                    f"all ranks must come to every all-reduce, but rank {rank} waited in vain for another, which has "
                    f"ended or stayed away for a minute; let all ranks make the same updates"
                )
            )
        except BaseException as error:
            errors.insert(0, error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
