"""Helpers for tests of a training: a world of any size in one process, XLA cores on a CPU, and a test of resuming."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import AbsentRankError
from variable_batch_size.backend.xla import launch
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.world import World

__all__ = ["ThreadBackend", "assert_resumes_identically", "launch", "run_ranks"]

Built = tuple[torch.nn.Module, CustomSampler, CustomOptimizer]

Result = TypeVar("Result")

_TIMEOUT = 60.0  # seconds that a rank waits for the others


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
        counted = self.collectives
        messages = super()._gather_bytes(message)
        self.collectives = counted
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
        sums = self._rendezvous.sums(self.world.rank, [tensor.detach() for tensor in tensors])
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.detach().copy_(total)


@final
class _Rendezvous:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT)
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=_TIMEOUT))
        self._inputs: list[Sequence[Tensor]] = [()] * size  # by rank

    def sums(self, rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors: the sums over all ranks."""
        self._inputs[rank] = tensors
        self.barrier.wait()
        _check_same(self._inputs)
        sums = [sum(summands[1:], start=summands[0].clone()) for summands in zip(*self._inputs, strict=True)]
        self.barrier.wait()  # no rank overwrites its inputs while others read them
        return sums


def _check_same(inputs: Sequence[Sequence[Tensor]]) -> None:
    """Raise RuntimeError unless all ranks sum tensors of the same shapes and dtypes; `inputs`: by rank."""
    described = [[(tuple(tensor.shape), tensor.dtype) for tensor in own] for own in inputs]
    for rank, own in enumerate(described):
        if own != described[0]:
            raise RuntimeError(
                f"all ranks must sum tensors of the same shapes and dtypes, but rank 0 has {described[0]} and rank "
                f"{rank} {own}; train the same parameters on all ranks"
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
        try:
            results[rank] = train(ThreadBackend(World(rank, size), rendezvous))
        except BaseException as error:
            if not isinstance(error.__cause__ or error, threading.BrokenBarrierError):
                errors.insert(len(errors) if isinstance(error, AbsentRankError) else 0, error)
                rendezvous.barrier.abort()
                return
            errors.append(
                RuntimeError(
                    f"every rank must take part in every all-reduce, but rank {rank} waited for one that has returned "
                    f"or is more than {_TIMEOUT:g} s late; give all ranks the same number of updates"
                )
            )

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
    """Check that a training which stops at random updates and resumes in other worlds ends like one that never stops.

    Each part of the training builds new objects and loads `model.state_dict()` and `optimizer.state_dict()`, as after a
    restart. Ranks are threads of this process, so a model that draws from torch's global generator (dropout) cannot be
    tested. Use float64 for the model and the data, or a larger `rtol`.

    Args:
        build: function that returns the model, the `CustomSampler` for `backend.world` and the optimizer with
            `backend=backend`; with the same initial weights at every call, drawn before it: the ranks share torch's
            global generator.
        loss_fn: function that returns the loss of a microbatch, given the model and the indices of the samples.
        updates: length of the training.
        stops: number of updates after which the training stops and resumes.
        worlds: numbers of ranks, from which each part of the training draws one.
        seed: seed of the stops and worlds. Default: another one at each call; the error reports it.
        rtol: tolerance for parameters and optimizer state, relative to the largest absolute value of each tensor.

    Raises:
        AssertionError: if a tensor differs, with its name, the stops, the worlds and the seed.
    """
    seed = random.randrange(2**32) if seed is None else seed
    rng = random.Random(seed)
    ends = [*sorted(rng.sample(range(updates), min(stops, updates))), updates]
    parts = [(end, rng.choice(list(worlds))) for end in ends]

    def train(end: int, world: int, state: _State | None) -> _State:
        return run_ranks(lambda backend: _train(build(backend), loss_fn, end, state), world)[0]

    uninterrupted, resumed = train(updates, 1, None), None
    for end, world in parts:
        resumed = train(end, world, resumed)
    found = dict(_tensors(resumed))
    for name, expected in _tensors(uninterrupted):
        if not _close(found[name], expected, rtol):
            raise AssertionError(
                f"a resumed training must equal an uninterrupted one, but {name} differs after {updates} updates in "
                f"parts of (last update, ranks) {parts}, seed {seed}; save everything that an update reads in "
                f"state_dict()"
            )


class _State(NamedTuple):
    model: dict[str, Any]
    optimizer: dict[str, Any]


def _train(
    built: Built, loss_fn: Callable[[torch.nn.Module, list[int]], Tensor], end: int, state: _State | None
) -> _State:
    """Train until `end` updates are committed, over as many epochs as needed, and return a copy of the state."""
    model, sampler, optimizer = built
    if state is not None:
        model.load_state_dict(copy.deepcopy(state.model))
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))
    while optimizer.updates < end:
        if optimizer.done:
            raise ValueError(
                f"the training must have {end} updates, but it ends after {optimizer.updates}; pass fewer updates, or "
                f'a sampler without max_updates, max_samples and on_end="stop"'
            )
        epoch = optimizer.epoch
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for indices in sampler:
            loss_fn(model, indices).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if optimizer.updates == end:
                break
    return copy.deepcopy(_State(model.state_dict(), optimizer.state_dict()))


def _tensors(state: Any, name: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(state, (Tensor, float)):
        return [(name, torch.as_tensor(state))]
    if isinstance(state, _State):
        state = state._asdict()
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    return [found for key, value in items for found in _tensors(value, f"{name}[{key!r}]" if name else str(key))]


def _close(found: Tensor, expected: Tensor, rtol: float) -> bool:
    """Return whether the shapes agree, and the values up to `rtol` times the largest expected one."""
    if found.shape != expected.shape or not found.numel():
        return found.shape == expected.shape
    largest = expected.abs().nan_to_num().max().item()
    return torch.allclose(found, expected, rtol=0, atol=rtol * largest, equal_nan=True)
