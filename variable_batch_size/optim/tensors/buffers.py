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
        """Release the copies of buffers that were neither written nor replaced since, and return this object.

        It saves memory: only what a forward pass has changed needs to be restored.
        """
        self._kept = [
            saved
            for saved in self._kept
            if saved.owner._buffers[saved.name] is not saved.buffer
            or versions_of([saved.buffer]) != [saved.version]  # counts changes in place
            or saved.name.startswith("running_")  # batch normalization on a CPU writes them and leaves the version
        ]
        return self

    @torch.no_grad()
    def restore(self) -> None:
        """Give the buffers the values that they had when this object was created, in the same tensors if shapes fit."""
        for owner, name, buffer, _, value in self._kept:
            has_same_shape = buffer.shape == value.shape
            if has_same_shape and all(buffer.stride()):  # an expanded one cannot be written
                buffer.copy_(value)
            owner._buffers[name] = buffer if has_same_shape else value
