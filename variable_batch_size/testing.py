"""Helpers for testing a training: a world of any size inside one process, several XLA cores on a CPU, and resuming."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.backend.xla import launch
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.world import World

__all__ = ["ThreadBackend", "assert_resumes_identically", "launch", "run_ranks"]

Built = tuple[torch.nn.Module, CustomSampler, CustomOptimizer]

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

    def store(self) -> dist.Store:
        """In the memory that all ranks share."""
        return self._meeting.store

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
        self.store = dist.HashStore()
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


def assert_resumes_identically(
    build: Callable[[Backend], Built],
    loss_fn: Callable[[torch.nn.Module, list[int]], Tensor],
    *,
    updates: int = 20,
    stops: int = 3,
    worlds: Sequence[int] = (1, 2, 3),
    seed: int | None = None,
    rtol: float = 1e-9,
) -> None:
    """Stop a training at random updates, go on in other worlds, and compare it with one that never stopped.

    Each part of the training builds everything anew and loads `model.state_dict()` and `optimizer.state_dict()`, as
    after a restart. Ranks are threads of this process, so a model that draws from torch's global generator (dropout)
    is no subject for this. Use float64 for the model and the data, or a larger `rtol`.

    Args:
        build: makes the model, the `CustomSampler` for `backend.world` (its size and rank) and the optimizer with
            `backend=backend`; with the same weights at every call.
        loss_fn: the loss of a microbatch, given the indices of its samples.
        updates: length of the training.
        stops: how often it is broken off.
        worlds: numbers of ranks, of which each part takes one.
        seed: of the stops and worlds; by default another one at each call, which the error names.
        rtol: of parameters and optimizer state, relative to the largest number of a tensor.

    Raises:
        AssertionError: naming what differs, where the training was broken off, and the seed.
    """
    seed = random.randrange(2**32) if seed is None else seed
    rng = random.Random(seed)
    ends = [*sorted(rng.sample(range(updates), min(stops, updates))), updates]
    parts = [(end, rng.choice(list(worlds))) for end in ends]

    def train(end: int, world: int, state: _State | None) -> _State:
        return run_ranks(lambda backend: _train(build(backend), loss_fn, end, state), world)[0]

    unbroken, broken = train(updates, 1, None), None
    for end, world in parts:
        broken = train(end, world, broken)
    found = dict(_tensors(broken))
    for name, expected in _tensors(unbroken):
        if not _close(found[name], expected, rtol):
            raise AssertionError(
                f"a training that stops must go on as if it had not, but {name} differs after {updates} updates that "
                f"were made as (up to update, on ranks) {parts}, seed {seed}; keep all that an update reads in "
                f"state_dict()"
            )


class _State(NamedTuple):
    model: dict[str, Any]
    optimizer: dict[str, Any]


def _train(
    built: Built, loss_fn: Callable[[torch.nn.Module, list[int]], Tensor], end: int, state: _State | None
) -> _State:
    """Up to update number `end`, over as many epochs as it takes."""
    model, sampler, optimizer = built
    if state is not None:
        model.load_state_dict(copy.deepcopy(state.model))
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))
    while optimizer.updates < end:
        if len(sampler) == 0:
            epoch = optimizer.epoch + 1
            sampler.set_epoch(epoch)
            optimizer.set_epoch(epoch)
        for indices in sampler:
            loss_fn(model, indices).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if optimizer.updates == end:
                break
    return copy.deepcopy(_State(model.state_dict(), optimizer.state_dict()))


def _tensors(state: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Every tensor and float of a state, with its path."""
    if isinstance(state, (Tensor, float)):
        return [(name, torch.as_tensor(state))]
    if isinstance(state, _State):
        state = state._asdict()
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    return [found for key, value in items for found in _tensors(value, f"{name}[{key!r}]" if name else str(key))]


def _close(found: Tensor, expected: Tensor, rtol: float) -> bool:
    if found.shape != expected.shape or not found.numel():
        return found.shape == expected.shape
    largest = expected.abs().nan_to_num().max().item()
    return torch.allclose(found, expected, rtol=0, atol=rtol * largest, equal_nan=True)
