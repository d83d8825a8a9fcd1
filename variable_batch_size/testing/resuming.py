"""A test of resuming, for any training."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.testing.ranks import run_ranks

Built = tuple[torch.nn.Module, CustomSampler, CustomOptimizer]


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
    """Check that a run with random stops, resumed on different numbers of ranks, ends like one that never stops.

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
    parts = [(end, rng.choice(list(worlds))) for end in ends]  # of the training: its last update, and number of ranks

    def train(end: int, world: int, state: _State | None) -> _State:
        return run_ranks(lambda backend: _train(build(backend), loss_fn, end, state), world)[0]

    uninterrupted = train(updates, 1, None)
    resumed = None
    for end, world in parts:
        resumed = train(end, world, resumed)
    tensors = dict(_named_tensors(resumed))
    for name, expected in _named_tensors(uninterrupted):
        if not _is_close(tensors[name], expected, rtol):
            raise AssertionError(
                f"a resumed training must equal one without a stop, but {name} differs after {updates} updates in "
                f"parts of (last update, ranks) {parts}, seed {seed}; save everything that an update reads in "
                "state_dict()"
            )


class _State(NamedTuple):
    """The state dicts that one part of a training passes to the next one."""

    model: dict[str, Any]
    optimizer: dict[str, Any]


def _train(
    built: Built, loss_fn: Callable[[torch.nn.Module, list[int]], Tensor], end: int, state: _State | None
) -> _State:
    """Train on one rank until `end` updates are made, over as many epochs as needed, and return a copy of the state.

    Args:
        built: new objects, as `build` of `assert_resumes_identically` returns them.
        loss_fn: see there.
        end: number of updates.
        state: the state from which to continue; None at the beginning.
    """
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


def _named_tensors(state: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors and floats within a state, each with its path, such as "model['weight']"."""
    if isinstance(state, (Tensor, float)):
        return [(name, torch.as_tensor(state))]
    if isinstance(state, _State):
        state = state._asdict()
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    return [pair for key, value in items for pair in _named_tensors(value, f"{name}[{key!r}]" if name else str(key))]


def _is_close(tensor: Tensor, expected: Tensor, rtol: float) -> bool:
    """Return whether two tensors have one shape, and values that differ by at most `rtol` times the largest one."""
    if tensor.shape != expected.shape or not tensor.numel():  # without elements the shapes decide
        return tensor.shape == expected.shape
    largest = expected.abs().nan_to_num().max().item()
    return torch.allclose(tensor, expected, rtol=0, atol=rtol * largest, equal_nan=True)
