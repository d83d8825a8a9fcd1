"""A state in host memory: as it is where it is written at once, or as a copy of its own that stays as it was.

The copy is what an update waits for while a checkpoint is written in the background, so its memory is kept from one
time to the next: fresh pages cost more than what is copied into them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from types import NoneType
from typing import Any, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend

_PLAIN = (NoneType, bool, int, float, str, bytes, torch.dtype, torch.Size)  # what loads without executing anything


@final
class Snapshot:
    """Brings states to the host by a backend, and keeps the memory of one copy.

    A copy is good until the next one is taken: that writes into the same memory.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kept: dict[Hashable, list[Tensor]] = {}  # by what fits into it

    def view(self, parts: dict[str, Any]) -> dict[str, Any]:
        """The same with its tensors on the host; those of the CPU are the training's own, which it will change.

        Raises:
            TypeError: where something in it could not be read again.
        """
        return _mapped(parts, self._backend.host)

    def copy(self, parts: dict[str, Any]) -> dict[str, Any]:
        """The same in host memory that nobody else has, whole when this returns.

        Raises:
            TypeError: where something in it could not be read again.
        """
        spare, self._kept = self._kept, {}
        copies: dict[Hashable, Tensor] = {}  # by what they are of: a tensor that is there twice is copied once
        sources: list[Tensor] = []

        def copied(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if not _ordinary(tensor):
                host = self._backend.host(tensor)
                return host.clone() if tensor.device.type == "cpu" else host
            form = (tensor.is_cuda, tensor.dtype, tensor.shape, tensor.stride())
            source = (tensor.device, tensor.data_ptr(), *form)
            if source not in copies:
                fitting = spare.get(form)
                pinned = tensor.is_cuda  # so that the copy need not wait for each tensor
                copy = fitting.pop() if fitting else torch.empty_like(tensor, device="cpu", pin_memory=pinned)
                self._kept.setdefault(form, []).append(copy)
                copies[source] = copy
                sources.append(tensor)
            return copies[source]

        state = _mapped(parts, copied)
        if sources:
            torch._foreach_copy_(list(copies.values()), sources, non_blocking=True)
        for device in {tensor.device for tensor in sources if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return state


def _ordinary(tensor: Tensor) -> bool:
    """Whether memory of its shape and type is all that it needs, and can be filled from where it is."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def _mapped(parts: dict[str, Any], host: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {name: _with_tensors(part, host, name) for name, part in parts.items()}


def _with_tensors(tree: Any, host: Callable[[Tensor], Tensor], where: str) -> Any:
    """The same in containers of its own; refuses what could not be read again."""
    if isinstance(tree, Tensor) and type(tree.detach()) is Tensor:  # no subclass but parameters, which are read again
        return host(tree)
    if type(tree) in _PLAIN:
        return tree
    if type(tree) in (dict, OrderedDict, Counter):
        for key in tree:
            _with_tensors(key, host, f"a key of {where}")
        copy = type(tree)({key: _with_tensors(value, host, f"{where}[{key!r}]") for key, value in tree.items()})
        if isinstance(tree, OrderedDict):
            copy.__dict__.update(vars(tree))  # the versions of a model's modules
        return copy
    if type(tree) in (list, tuple):
        return type(tree)(_with_tensors(value, host, f"{where}[{index}]") for index, value in enumerate(tree))
    raise TypeError(
        f"a checkpoint must hold nothing but tensors and plain values, but {where} is a "
        f"{type(tree).__module__}.{type(tree).__qualname__}; let that part's state_dict() give numbers, strings, lists"
    )
