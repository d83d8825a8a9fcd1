"""What the devices owe to the rest of the package: one sum over the world, and a way to the host."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from variable_batch_size.world import World


class Backend(ABC):
    """The little that differs between one process, `torch.distributed` and PyTorch/XLA.

    `static_graph` says that every update has to issue the same operations, whatever its numbers are: then
    numbers travel as tensors (`scalar`), and gradients stay allocated.
    """

    static_graph: ClassVar[bool] = False

    def __init__(self, world: World) -> None:
        self.world = world

    @abstractmethod
    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, in place, with one collective a dtype."""

    def scalars(self, values: Sequence[float], like: Tensor) -> Sequence[Any]:
        """`values` as factors for `like`: as they are where that is free, else 0-D tensors that are no constants."""
        return values

    @final
    def scalar(self, value: float, like: Tensor) -> Any:
        """A single one of them."""
        return self.scalars([value], like)[0]

    def number(self, value: Any) -> Any:
        """A hyperparameter as the inner optimizer gets it: where Python numbers can become constants, never one."""
        return value

    def mark_step(self) -> None:  # noqa: B027 (only lazy devices have something to do)
        """End the present graph, on devices that have graphs."""

    def host(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` in host memory; waits for the device."""
        return tensor.detach().cpu()

    def exchange(self, message: bytes) -> list[bytes]:
        """What each rank has to say, by rank; waits on the host until all have come."""
        world = self.world
        if world.size == 1:
            return [message]
        lengths = torch.zeros(world.size, dtype=torch.int64)
        lengths[world.rank] = len(message)
        self.all_reduce_sum([lengths])
        rows = torch.zeros(world.size, int(lengths.max()), dtype=torch.uint8)
        rows[world.rank].numpy().data[: len(message)] = message
        self.all_reduce_sum([rows])
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def store(self) -> dist.Store:
        """Where ranks leave notes for one another without waiting, the same for all; every rank has to call it."""
        if self.world.size == 1:
            return dist.HashStore()
        hosts = self.exchange(socket.gethostname().encode())
        host = hosts[0].decode() if len(set(hosts)) > 1 else "localhost"
        server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if self.world.rank == 0 else None
        port = int(self.exchange(b"%d" % (server.port if server else 0))[0])
        return server or dist.TCPStore(host, port, is_master=False)

    def print0(self, *values: object) -> None:
        """Print on rank 0 only."""
        if self.world.rank == 0:
            print(*values, flush=True)
