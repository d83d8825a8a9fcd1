"""The buffers of a module, kept, and put back."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Module

from variable_batch_size.optim.tensors.parameters import versions_of


class _Buffer(NamedTuple):
    owner: Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor


@final
class KeptBuffers:
    """The values that the buffers of a module have now."""

    def __init__(self, module: Module) -> None:
        self._kept = [
            _Buffer(owner, name, buffer, versions_of([buffer])[0], buffer.clone())
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]

    def drop_unwritten(self) -> KeptBuffers:
        """Keep those only that were written or replaced since, and return them."""
        self._kept = [
            kept
            for kept in self._kept
            if kept.owner._buffers[kept.name] is not kept.buffer
            or versions_of([kept.buffer]) != [kept.version]
            or kept.name.startswith("running_")  # batch normalization on a CPU writes them and leaves the version
        ]
        return self

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back."""
        for owner, name, buffer, _, value in self._kept:
            same = buffer.shape == value.shape
            if same and all(buffer.stride()):  # an expanded one cannot be written
                buffer.copy_(value)
            owner._buffers[name] = buffer if same else value
