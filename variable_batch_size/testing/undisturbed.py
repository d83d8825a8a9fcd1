"""Forwards of a model that leave no traces in it, nor in random numbers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, ModuleType, NoneType
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from variable_batch_size.backend.generators import kept_states
from variable_batch_size.optim.tensors.buffers import KeptBuffers
from variable_batch_size.optim.tensors.parameters import versions_of

_LARGEST: Final = 2**20  # most elements of a tensor or container that is copied: enough for metrics, not for data
_MOST_NAMES: Final = 1000  # most items of a dict or list whose values are searched
_DEPTH: Final = 9  # most references that are followed to a generator, as through wrappers of datasets
_MOST_OBJECTS: Final = 100_000  # most objects that are searched at one depth below the owners
_DATA: Final = (Tensor, np.ndarray, int, float, complex, str, bytes, type, ModuleType, NoneType)


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
        for module, mode in modes:  # scripted modules do not keep it in __dict__, so that kept_attributes misses it
            module.training = mode


@contextmanager
def kept_attributes(*owners: object) -> Iterator[None]:
    """Restore, after a block, the attributes of objects, see `KeptAttributes`, and the buffers of modules."""
    attributes = KeptAttributes(*owners)
    buffers = [KeptBuffers(owner) for owner in owners if isinstance(owner, nn.Module)]
    try:
        yield
    finally:
        attributes.restore()
        for kept_buffers in buffers:
            kept_buffers.restore()


@final
class KeptAttributes:
    """A copy of the attributes that objects have now: which values, the contents of lists, dicts and sets, and tensors.

    For a module it has those of all its submodules, and the weights that a forward pass scales (`max_norm` of
    embeddings). Other objects that attributes refer to are not copied, but the states of random generators in them are.
    """

    def __init__(self, *owners: object) -> None:
        objects = list[Any]()  # the owners, or all submodules of owners that are modules
        for owner in owners:
            objects.extend(owner.modules() if isinstance(owner, nn.Module) else [owner])
        generators = _generators_within(objects)
        containers: dict[int, Any] = {}  # lists, dicts and sets among the attributes, by id
        for holder in objects:
            _collect_containers(getattr(holder, "__dict__", None), containers)
        self._containers = [(container, _content_of(container)) for container in containers.values()]
        by_id = {id(value): value for holder in objects for value in getattr(holder, "__dict__", {}).values()}
        tensors = [value for value in by_id.values() if isinstance(value, Tensor) and value.numel() <= _LARGEST]
        # The weights of embeddings with max_norm, which a forward pass scales.
        tensors += [layer.weight for layer in objects if getattr(layer, "max_norm", None) and hasattr(layer, "weight")]
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]  # an inference tensor has no version
        self._tensors = [(tensor, versions_of([tensor]), tensor.detach().clone()) for tensor in tensors]
        self._set_states = [partial(set_state, state()) for state, set_state in generators]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what has changed since this object was created: containers, tensors and random generators."""
        for container, content in self._containers:
            if not _is_same(_content_of(container), content):
                container.clear()
                if isinstance(container, (list, deque)):
                    container.extend(content)
                else:
                    container.update(content)
        for tensor, version, value in self._tensors:
            if versions_of([tensor]) != version:
                tensor.copy_(value)
        for set_state in self._set_states:
            set_state()


def _collect_containers(value: Any, containers: dict[int, Any]) -> None:
    """If `value` is a list, dict or set, add it to `containers`, by its id, with those that are values of a dict.

    Large ones are left out.
    """
    if isinstance(value, (list, deque, dict, set)) and len(value) <= _LARGEST and id(value) not in containers:
        containers[id(value)] = value
        if isinstance(value, dict) and len(value) <= _MOST_NAMES:
            for name, item in value.items():
                if name != "_parameters":  # FSDP2 replaces these in a forward pass, and tracks which are in the dict
                    _collect_containers(item, containers)


_State = tuple[Callable[[], Any], Callable[[Any], Any]]  # functions that get and set the state of a random generator


def _state_of(value: Any) -> _State | None:
    """Return functions that get and set the state of a random generator; None if the value is none."""
    if isinstance(value, np.random.Generator):
        bit_generator: Any = value.bit_generator
        return (lambda: bit_generator.state), (lambda state: setattr(bit_generator, "state", state))
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return value.get_state, value.set_state
    return (value.getstate, value.setstate) if isinstance(value, random.Random) else None


def _generators_within(owners: Sequence[object]) -> list[_State]:
    """Return the random generators that objects refer to, by attributes, items, arguments of partials and closures."""
    generators, level = list[_State](), list(owners)
    seen = dict[int, Any]()  # by id; it keeps the objects, so that no other object gets the same id
    for _ in range(_DEPTH):  # breadth first: `level` has the objects at one depth
        level = [value for value in {id(value): value for value in level}.values() if id(value) not in seen]
        seen |= {id(value): value for value in level}
        generators += [state for state in map(_state_of, level) if state is not None]
        referred = [inner for value in level for inner in _referred_by(value) if not _is_data(inner)]
        level = referred[:_MOST_OBJECTS]
    return generators


def _is_data(value: Any) -> bool:
    """Return whether a value is not searched for generators: numbers, text, arrays, empty or large containers, ..."""
    is_container = isinstance(value, (Mapping, list, tuple, set, deque))
    return isinstance(value, _DATA) or (is_container and not 0 < len(value) <= _MOST_NAMES)


def _referred_by(value: Any) -> list[Any]:
    """Return the objects to which a value refers directly: items, attributes, variables of a closure, ..."""
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, (list, tuple, set, deque)):
        return [*value]
    cells = getattr(value, "__closure__", None) or ()  # of the variables that a function takes from the one around it
    enclosed = [cell.cell_contents for cell in cells if cell != CellType()]  # an empty cell has no contents
    bound = list[Any]()  # the object of a method, and the arguments of a functools.partial
    if callable(value):
        bound = [getattr(value, "__self__", None), getattr(value, "args", None), getattr(value, "keywords", None)]
    attributes = getattr(value, "__dict__", {}).values()
    return [*attributes, *bound, *enclosed]


def _content_of(container: Any) -> dict[Any, Any] | list[Any]:
    """Return a shallow copy of a container: a dict, or a list of its items."""
    return dict(container) if isinstance(container, Mapping) else list(container)


def _is_same(content: Any, before: Any) -> bool:
    """Return whether two results of `_content_of` have the same objects in the same order, by identity."""
    if isinstance(content, dict):
        return _is_same([*content], [*before]) and _is_same([*content.values()], [*before.values()])
    return [*map(id, content)] == [*map(id, before)]
