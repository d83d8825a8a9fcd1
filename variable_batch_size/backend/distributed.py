"""Processes joined by `torch.distributed`, whatever carries their messages: gloo, NCCL, XCCL, TorchTPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from variable_batch_size.backend.base import Backend
from variable_batch_size.world import World


@final
class DistributedBackend(Backend):
    """The ranks of `group` (default: of the default process group)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(World(dist.get_rank(group), dist.get_world_size(group)))
        self._group = group
        self._flat: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}  # kept: new memory costs as much as a sum

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """One flat message a dtype and device."""
        if self.world.size == 1:
            return

        def kind(tensor: Tensor) -> str:
            return f"{tensor.device} {tensor.dtype}"

        for _, alike in groupby(sorted(tensors, key=kind), key=kind):
            parts = list(alike)
            flat = self._buffer(parts[0], sum(part.numel() for part in parts))
            torch.cat([part.detach().reshape(-1) for part in parts], out=flat)
            dist.all_reduce(flat, group=self._group)
            torch._foreach_copy_(parts, _like(flat, parts))

    def exchange(self, message: bytes) -> list[bytes]:
        """By the group's own way to send objects, on whatever device it needs."""
        said: list[Any] = [message] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(said, message, group=self._group)
        return said

    def store(self) -> dist.Store:
        """The group's own, by which its ranks have met."""
        group = self._group or dist.group.WORLD
        assert group is not None
        return group.get_group_store()

    def _buffer(self, like: Tensor, size: int) -> Tensor:
        key = (like.device, like.dtype, size)
        if key not in self._flat:
            self._flat = {known: flat for known, flat in self._flat.items() if known[:2] != key[:2]}
            self._flat[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._flat[key]


def _like(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor in the shapes of `parts`."""
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
