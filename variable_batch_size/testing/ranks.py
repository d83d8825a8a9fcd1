"""A world of any size in one process, whose ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar, final

import torch.distributed as dist
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import AbsentRankError
from variable_batch_size.world import World

Result = TypeVar("Result")

_TIMEOUT = 60.0  # seconds that a rank waits for the others at most


@final
class ThreadBackend(Backend):
    """One of several ranks that are threads of this process. `run_ranks` makes them.

    Attributes:
        collectives: number of calls of `all_reduce_sum` so far.
    """

    def __init__(self, world: World, rendezvous: _Rendezvous) -> None:
        super().__init__(world)
        self._rendezvous = rendezvous
        self.collectives = 0

    def store(self) -> dist.Store:
        """Return a key-value store in the memory that all ranks share."""
        return self._rendezvous.store

    def _gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank; the sums that this takes are not counted in `collectives`."""
        collectives_before = self.collectives
        messages = super()._gather_bytes(message)
        self.collectives = collectives_before
        return messages

    @property
    def rank_has_ended(self) -> bool:
        """Whether another rank has failed."""
        return self._rendezvous.barrier.broken

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum the tensors over all ranks, in place and in the order of the ranks; wait at most a minute for them.

        Raises:
            threading.BrokenBarrierError: if another rank does not call it within the minute, or has failed.
        """
        self.collectives += 1
        sums = self._rendezvous.sum_over_ranks(self.world.rank, [tensor.detach() for tensor in tensors])
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.detach().copy_(total)


@final
class _Rendezvous:
    """What the ranks share: a barrier, a store, and the tensors that they sum."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT)
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=_TIMEOUT))
        self._inputs: list[Sequence[Tensor]] = [()] * size  # by rank

    def sum_over_ranks(self, rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of the tensors over all ranks, in the order of the ranks, as new tensors."""
        self._inputs[rank] = tensors
        self.barrier.wait()
        _check_same(self._inputs)
        sums = [sum(summands[1:], start=summands[0].clone()) for summands in zip(*self._inputs, strict=True)]
        self.barrier.wait()  # no rank overwrites its inputs while others read them
        return sums


def _check_same(inputs: Sequence[Sequence[Tensor]]) -> None:
    """Raise RuntimeError unless all ranks sum tensors of the same shapes and dtypes; `inputs`: by rank."""
    described = [[(tuple(tensor.shape), tensor.dtype) for tensor in tensors] for tensors in inputs]
    for rank, shapes_and_dtypes in enumerate(described):
        if shapes_and_dtypes != described[0]:
            raise RuntimeError(
                f"all ranks must sum tensors of the same shapes and dtypes, but rank 0 has {described[0]} and rank "
                f"{rank} {shapes_and_dtypes}; train the same parameters on all ranks"
            )


def run_ranks(train: Callable[[Backend], Result], size: int) -> list[Result]:
    """Run `train(backend)` on `size` ranks, each a thread of this process, and return the results by rank.

    Args:
        train: function of the backend of a rank.
        size: number of ranks.

    Raises:
        Exception: the first exception that a rank raised; the other ranks do not wait for it.
        RuntimeError: if a rank returned, or was more than a minute late, while another was in an all-reduce; or if the
            ranks sum tensors of different shapes or dtypes.
    """
    rendezvous = _Rendezvous(size)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        """Train on one rank, in its thread; store the result, or the error."""
        try:
            results[rank] = train(ThreadBackend(World(rank, size), rendezvous))
        except BaseException as error:
            if not isinstance(error.__cause__ or error, threading.BrokenBarrierError):
                # The first error in the list is raised: one of a rank that only missed another rank comes last.
                errors.insert(len(errors) if isinstance(error, AbsentRankError) else 0, error)
                rendezvous.barrier.abort()
                return
            requirement = "every rank must take part in every all-reduce"
            found = f"rank {rank} waited for one that has returned or is more than {_TIMEOUT:g} s late"
            errors.append(RuntimeError(f"{requirement}, but {found}; give all ranks the same number of updates"))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
