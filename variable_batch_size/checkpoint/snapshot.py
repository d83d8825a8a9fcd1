"""Bring a state to host memory: as a view, if it is written immediately, or as a copy that stays unchanged.

An update waits for the copy while a checkpoint is written in the background. The memory of the copy is therefore
reused: allocating fresh pages takes longer than copying into them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable
from types import NoneType
from typing import Any, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend

_PLAIN = (NoneType, bool, int, float, str, bytes, torch.dtype, torch.Size)  # types that load without executing code


@final
class Snapshot:
    """Views and copies of states in host memory; keeps the memory of one copy.

    A copy is valid until the next call of `copy`, which writes into the same memory.

    Args:
        backend: brings tensors to the host.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: dict[Hashable, list[Tensor]] = {}  # by layout

    def view(self, parts: dict[str, Any], elsewhere: Container[str] = ()) -> dict[str, Any]:
        """Return the state with its tensors on the host; CPU tensors share memory with the training.

        Args:
            parts: state dicts by name.
            elsewhere: the places of tensors that other ranks save; tensors on the meta device replace them.

        Raises:
            TypeError: if the state holds a value that `torch.load(weights_only=True)` cannot read.
        """
        host = self._backend.host
        return map_tensors(parts, lambda tensor, where: _meta(tensor) if where in elsewhere else host(tensor))

    def copy(self, parts: dict[str, Any], elsewhere: Container[str] = ()) -> dict[str, Any]:
        """Return the state in host memory of its own, complete on return; arguments and error as those of `view`."""
        reusable, self._buffers = self._buffers, {}
        copies: dict[Hashable, Tensor] = {}  # by source, so that a tensor that occurs twice is copied once
        sources: list[Tensor] = []

        def copy(tensor: Tensor, where: str) -> Tensor:
            if where in elsewhere:
                return _meta(tensor)
            tensor = tensor.detach()
            if not is_dense(tensor):
                host = self._backend.host(tensor)
                return host.clone() if tensor.device.type == "cpu" else host
            layout = (tensor.is_cuda, tensor.dtype, tensor.shape, tensor.stride())
            source = (tensor.device, tensor.data_ptr(), *layout)
            if source not in copies:
                fitting = reusable.get(layout)
                pinned = tensor.is_cuda  # so that copies from the device are asynchronous
                buffer = fitting.pop() if fitting else torch.empty_like(tensor, device="cpu", pin_memory=pinned)
                self._buffers.setdefault(layout, []).append(buffer)
                copies[source] = buffer
                sources.append(tensor)
            return copies[source]

        state = map_tensors(parts, copy)
        if sources:
            torch._foreach_copy_(list(copies.values()), sources, non_blocking=True)
        for device in {tensor.device for tensor in sources if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return state


def check_storable(parts: dict[str, Any]) -> None:
    """Check that a checkpoint can hold these states.

    Raises:
        TypeError: if a state holds a value that `torch.load(weights_only=True)` cannot read.
    """
    map_tensors(parts, lambda tensor, where: tensor)


def is_dense(tensor: Tensor) -> bool:
    """Return whether `copy_` can fill a strided buffer on the host from this tensor."""
    return (
        type(tensor.detach()) is Tensor
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def map_tensors(parts: dict[str, Any], function: Callable[[Tensor, str], Tensor]) -> dict[str, Any]:
    """Return the state in new containers, with what `function` returns for each tensor and its place in the state.

    Raises:
        TypeError: if the state holds a value that `torch.load(weights_only=True)` cannot read.
    """
    return {name: _map_tree(part, function, name) for name, part in parts.items()}


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="meta")


def _map_tree(tree: Any, function: Callable[[Tensor, str], Tensor], where: str) -> Any:
    if isinstance(tree, Tensor) and type(tree.detach()) is Tensor:  # of the subclasses, only parameters and buffers
        return function(tree, where)
    if type(tree) in _PLAIN:
        return tree
    if type(tree) in (dict, OrderedDict, Counter):
        for key in tree:
            _map_tree(key, function, f"a key of {where}")
        copy = type(tree)({key: _map_tree(value, function, f"{where}[{key!r}]") for key, value in tree.items()})
        if isinstance(tree, OrderedDict):
            copy.__dict__.update(vars(tree))  # `_metadata`: the versions of a model's modules
        return copy
    if type(tree) in (list, tuple):
        return type(tree)(_map_tree(value, function, f"{where}[{index}]") for index, value in enumerate(tree))
    raise TypeError(
        f"a checkpoint can hold only tensors and plain Python values, got a {type(tree).__module__}."
        f"{type(tree).__qualname__} at {where}; return numbers, strings, lists and dicts from that part's state_dict()"
    )
