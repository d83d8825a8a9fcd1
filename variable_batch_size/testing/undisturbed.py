"""Forwards of a model that leave no traces in it, nor in random numbers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from variable_batch_size.backend.generators import kept_states
from variable_batch_size.optim.tensors.buffers import KeptBuffers
from variable_batch_size.optim.tensors.parameters import versions_of

_LARGEST: Final = 2**20  # numbers of a tensor, or items of a list, that are kept: those of metrics, not of data
_MOST_NAMES: Final = 1000  # of a dict whose values are looked into


@contextmanager
def undisturbed_evaluation(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; restore afterwards what forwards change, also attributes and random numbers."""
    buffers, modes = KeptBuffers(model), [(module, module.training) for module in model.modules()]
    devices = {part.device for part in model.parameters() if part.device.type in ("cuda", "xpu")}
    forked = torch.random.fork_rng(devices, device_type=next(iter(devices)).type if devices else "cuda")
    try:
        with kept_states(), forked, kept_attributes(*model.modules()):
            model.eval()
            yield
    finally:
        for module, mode in modes:  # those of scripted modules are no attributes
            module.training = mode
        buffers.restore()


@contextmanager
def kept_attributes(*owners: object) -> Iterator[None]:
    """Restore, after a block, the attributes of objects; see `KeptAttributes`."""
    attributes = KeptAttributes(*owners)
    try:
        yield
    finally:
        attributes.restore()


@final
class KeptAttributes:
    """The attributes that objects have now: values, lists, dicts and sets of these, random generators, and tensors.

    What these values refer to further, such as objects of other classes and what is in a list, is not looked into.
    """

    def __init__(self, *owners: object) -> None:
        containers: dict[int, Any] = {}
        for owner in owners:
            _collect_containers(getattr(owner, "__dict__", None), containers)
        self._containers = [(container, _content_of(container)) for container in containers.values()]
        values = {id(value): value for owner in owners for value in getattr(owner, "__dict__", {}).values()}.values()
        tensors = [value for value in values if isinstance(value, Tensor) and value.numel() <= _LARGEST]
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]  # which has no version
        self._tensors = [(tensor, versions_of([tensor]), tensor.detach().clone()) for tensor in tensors]
        self._set_states = [partial(set_state, state()) for value in values for state, set_state in _state_of(value)]

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


def _state_of(value: Any) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return what gets the state of a random generator, and what sets it; nothing for other values."""
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return [(lambda: bits.state, lambda state: setattr(bits, "state", state))]
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return [(value.get_state, value.set_state)]
    return [(value.getstate, value.setstate)] if isinstance(value, random.Random) else []


def _content_of(container: Any) -> dict[Any, Any] | list[Any]:
    return dict(container) if isinstance(container, Mapping) else list(container)


def _is_same(content: Any, before: Any) -> bool:
    """Return whether two contents have the same objects in the same order."""
    if isinstance(content, dict):
        return _is_same([*content], [*before]) and _is_same([*content.values()], [*before.values()])
    return [*map(id, content)] == [*map(id, before)]
