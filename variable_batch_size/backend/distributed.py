"""The backend of processes that `torch.distributed` connects: gloo, NCCL, XCCL or TorchTPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from variable_batch_size.backend.base import Backend
from variable_batch_size.backend.channel import Channel, open_channel, used_numbers
from variable_batch_size.backend.ending import end_threads_at_exit
from variable_batch_size.backend.flat import split_flat
from variable_batch_size.world import World


@final
class DistributedBackend(Backend):
    """The ranks of a process group.

    Args:
        group: process group to which this process belongs. Default: the default process group.

    Raises:
        ValueError: if no process group is initialized, or this process does not belong to `group`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(World(dist.get_rank(group), dist.get_world_size(group)))
        end_threads_at_exit()
        self._group = group
        # Other groups cannot be created without all ranks; and with all checks of torch, starting a sum waits for them.
        detail = dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[no-untyped-call]
        self.overlaps = group in (None, dist.group.WORLD) and not detail
        # The flat messages, by device, dtype and length. They are reused: allocation takes as long as the sum.
        self._buffers: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum the tensors over all ranks, in place, as one flat message per dtype and device."""
        if self.world.size == 1:
            return

        def key(tensor: Tensor) -> str:
            return f"{tensor.device} {tensor.dtype}"

        for _, same_key in groupby(sorted(tensors, key=key), key=key):
            parts = list(same_key)
            flat = self._buffer(parts[0], sum(part.numel() for part in parts))  # (sum of numels,)
            torch.cat([part.detach().reshape(-1) for part in parts], out=flat)
            dist.all_reduce(flat, group=self._group)
            torch._foreach_copy_(parts, split_flat(flat, parts))

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Gather every rank's message, by rank; torch chooses the device."""
        messages: list[Any] = [message] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(messages, message, group=self._group)
        return messages

    def open_channel(self) -> Channel:
        """Return a channel in a process group of all ranks that no other open channel uses on any rank."""
        group = self._own_group()
        used = self.any_rank([*used_numbers(group), False], self.device)
        return open_channel(group, used.index(False))

    def store(self) -> dist.Store:
        """Return the store through which the ranks of the group found one another."""
        return self._own_group().get_group_store()

    @property
    def device(self) -> torch.device:
        """The CPU if the process group has a backend for it, otherwise its accelerator."""
        kinds = [entry.split(":")[0] for entry in dist.get_backend_config(self._group).split(",")]
        return torch.device("cpu" if "cpu" in kinds else kinds[0])

    def _own_group(self) -> dist.ProcessGroup:
        group = self._group or dist.group.WORLD
        assert group is not None  # for mypy: the constructor has raised otherwise
        return group

    def _buffer(self, like: Tensor, length: int) -> Tensor:
        """Return the buffer of this length, and drop those of other lengths with the device and dtype of `like`."""
        key = (like.device, like.dtype, length)
        if key not in self._buffers:
            self._buffers = {known: buffer for known, buffer in self._buffers.items() if known[:2] != key[:2]}
            self._buffers[key] = torch.empty(length, dtype=like.dtype, device=like.device)
        return self._buffers[key]
