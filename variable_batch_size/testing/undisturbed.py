"""Forwards of a model that leave no traces in it, nor in random numbers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, ModuleType
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from variable_batch_size.backend.generators import kept_states
from variable_batch_size.optim.tensors.buffers import KeptBuffers
from variable_batch_size.optim.tensors.parameters import versions_of

_LARGEST: Final = 2**20  # numbers of a tensor, or items of a list, that are kept: those of metrics, not of data
_MOST_NAMES: Final = 1000  # of a dict or list whose values are looked into
_DEPTH: Final = 9  # references that are followed to a generator, as through wrappers of datasets
_MOST_OBJECTS: Final = 10_000  # that are as deep


@contextmanager
def undisturbed_evaluation(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; restore afterwards what forwards change, also attributes and random numbers."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {part.device for part in model.parameters() if part.device.type in ("cuda", "xpu")}
    forked = torch.random.fork_rng(devices, device_type=next(iter(devices)).type if devices else "cuda")
    try:
        with kept_states(), forked, kept_attributes(model):
            model.eval()
            yield
    finally:
        for module, mode in modes:  # those of scripted modules are no attributes
            module.training = mode


@contextmanager
def kept_attributes(*owners: object) -> Iterator[None]:
    """Restore, after a block, the attributes of objects, see `KeptAttributes`, and the buffers of modules."""
    attributes, buffers = KeptAttributes(*owners), [KeptBuffers(one) for one in owners if isinstance(one, nn.Module)]
    try:
        yield
    finally:
        attributes.restore()
        for kept in buffers:
            kept.restore()


@final
class KeptAttributes:
    """The attributes that objects have now: values, lists, dicts and sets of these, and tensors.

    A module stands for all its modules, with the weights that its forwards scale (`max_norm` of embeddings). What these
    values refer to further, such as objects of other classes, is looked into for random generators alone.
    """

    def __init__(self, *owners: object) -> None:
        generators = _generators_within(owners)
        owners = tuple(part for one in owners for part in (one.modules() if isinstance(one, nn.Module) else [one]))
        containers: dict[int, Any] = {}
        for owner in owners:
            _collect_containers(getattr(owner, "__dict__", None), containers)
        self._containers = [(container, _content_of(container)) for container in containers.values()]
        values = {id(value): value for owner in owners for value in getattr(owner, "__dict__", {}).values()}.values()
        tensors = [value for value in values if isinstance(value, Tensor) and value.numel() <= _LARGEST]
        tensors += [one.weight for one in owners if getattr(one, "max_norm", None) and hasattr(one, "weight")]
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]  # which has no version
        self._tensors = [(tensor, versions_of([tensor]), tensor.detach().clone()) for tensor in tensors]
        self._set_states = [partial(set_state, state()) for state, set_state in generators]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what has changed."""
        for container, content in self._containers:
            if not _is_same(_content_of(container), content):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        for tensor, version, value in self._tensors:
            if versions_of([tensor]) != version:
                tensor.copy_(value)
        for set_state in self._set_states:
            set_state()


def _collect_containers(value: Any, containers: dict[int, Any]) -> None:
    """Add a list, dict or set to `containers`, by identity, with those that are values of dicts; not those of data."""
    if isinstance(value, (list, deque, dict, set)) and len(value) <= _LARGEST and id(value) not in containers:
        containers[id(value)] = value
        if isinstance(value, dict) and len(value) <= _MOST_NAMES:
            for name, item in value.items():
                if name != "_parameters":  # FSDP2 replaces them, and knows which are there
                    _collect_containers(item, containers)


_State = tuple[Callable[[], Any], Callable[[Any], Any]]  # what gets the state of a generator, and what sets it


def _state_of(value: Any) -> _State | None:
    """Return how to get and to set the state of a random generator; None for other values."""
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return value.get_state, value.set_state
    return (value.getstate, value.setstate) if isinstance(value, random.Random) else None


def _generators_within(owners: Sequence[object]) -> list[_State]:
    """Return the random generators that objects refer to, by attributes, items, arguments of partials and closures."""
    found, seen, level = list[_State](), dict[int, Any](), list(owners)  # which keeps what has an id
    for _ in range(_DEPTH):
        level = [one for one in {id(one): one for one in level}.values() if id(one) not in seen][:_MOST_OBJECTS]
        seen |= {id(one): one for one in level}
        found += [state for state in map(_state_of, level) if state is not None]
        level = [inner for one in level for inner in _referred_by(one)]
    return found


def _referred_by(value: Any) -> list[Any]:
    """Return what a value refers to, unless it is data or a class."""
    if isinstance(value, (Tensor, np.ndarray, str, bytes, type, ModuleType)):
        return []
    if isinstance(value, Mapping):
        return [*value.values()] if len(value) <= _MOST_NAMES else []
    if isinstance(value, (list, tuple, set, deque)):
        return [*value] if len(value) <= _MOST_NAMES else []
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if cell != CellType()]
    of_call = [getattr(value, "__self__", None), getattr(value, "args", None), getattr(value, "keywords", None)]
    attributes = getattr(value, "__dict__", {}).values()
    return [*attributes, *(of_call if callable(value) else []), *cells]


def _content_of(container: Any) -> dict[Any, Any] | list[Any]:
    return dict(container) if isinstance(container, Mapping) else list(container)


def _is_same(content: Any, before: Any) -> bool:
    """Return whether two contents have the same objects in the same order."""
    if isinstance(content, dict):
        return _is_same([*content], [*before]) and _is_same([*content.values()], [*before.values()])
    return [*map(id, content)] == [*map(id, before)]
