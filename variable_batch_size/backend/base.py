"""The interface of a backend: one sum over all ranks, and copies to the host."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size.backend.channel import Channel
from variable_batch_size.world import World


class Backend(ABC):
    """What differs between one process, `torch.distributed` and PyTorch/XLA.

    A subclass implements `all_reduce_sum`, on which the other collectives are built. It overrides these if its
    device needs or has a better way.

    Args:
        world: this rank, and the number of ranks.

    Attributes:
        world: this rank, and the number of ranks.
        static_graph: whether every update must issue the same operations, whatever its numbers are. If so, numbers
            are passed to the device as tensors (see `scalars`).
        overlaps: whether it has `open_channel`, with which sums run beside a computation.
    """

    static_graph: ClassVar[bool] = False
    overlaps: bool = False

    def __init__(self, world: World) -> None:
        self.world = world

    # Collectives: every rank has to call them, in the same order. -------------------------------------------------

    @abstractmethod
    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, in place, with one collective per dtype.

        Args:
            tensors: of the same shapes and dtypes on every rank.
        """

    @final
    def all_gather_floats(self, row: Sequence[float], device: torch.device) -> Tensor:
        """Return the rows of all ranks.

        Args:
            row: numbers that float32 represents exactly, or that may be rounded to it; of the same length on every
                rank.
            device: device on which ranks communicate.

        Returns:
            float32 tensor of shape (world size, len(row)) in host memory.
        """
        # A sum of rows that are 0 except on one rank: the only collective that every backend has.
        rows = torch.zeros(self.world.size, len(row), dtype=torch.float32)
        rows[self.world.rank] = torch.tensor(row, dtype=torch.float32)
        rows = rows.to(device)
        self.all_reduce_sum([rows])
        return self.host(rows)

    @final
    def any_rank(self, mask: Sequence[bool], device: torch.device) -> list[bool]:
        """Return, for each entry of `mask`, whether it is true on any rank.

        Args:
            mask: of the same length on every rank.
            device: device on which ranks communicate.
        """
        return self.all_gather_floats([int(entry) for entry in mask], device).any(dim=0).tolist()

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank. Messages may differ in length."""
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

    def open_channel(self) -> Channel:
        """Return a way to sum tensors while the caller computes; every rank has to call it.

        Raises:
            NotImplementedError: unless `overlaps`.
        """
        raise NotImplementedError

    def store(self) -> dist.Store:
        """Return a key-value store that all ranks share, through which they communicate without a collective."""
        if self.world.size == 1:
            return dist.HashStore()
        hosts = self.all_gather_bytes(socket.gethostname().encode())
        host = hosts[0].decode() if len(set(hosts)) > 1 else "localhost"
        server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if self.world.rank == 0 else None
        port = int(self.all_gather_bytes(b"%d" % (server.port if server else 0))[0])
        return server or dist.TCPStore(host, port, is_master=False)

    # The device. --------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """A device on which the ranks can communicate, for numbers that are on none."""
        return torch.device("cpu")

    def scalars(self, values: Sequence[float], like: Tensor, place: str = "") -> Sequence[Any]:
        """Return factors for `like` that do not become constants of a graph.

        Args:
            values: Python numbers.
            like: tensor whose device and dtype the factors must fit.
            place: name of the place in the graphs that use the factors, if they are often the same ones; a graph has
                each place once. A number that was sent there before is not sent again.

        Returns:
            `values` themselves if the device compiles no graphs, otherwise 0-D tensors.
        """
        return values

    def vectors(self, rows: Sequence[Sequence[float]], like: Tensor, place: str) -> Sequence[Tensor]:
        """Return rows of numbers as 1-D tensors of the device and dtype of `like`, without a wait for the device.

        Args:
            rows: Python numbers, as many in each row.
            like: tensor whose device and dtype they get.
            place: see `scalars`.
        """
        packed = torch.tensor(rows, dtype=like.dtype)
        packed = packed.pin_memory() if like.is_cuda else packed
        return packed.to(like.device, non_blocking=True).unbind()

    @final
    def scalar(self, value: float, like: Tensor, place: str = "") -> Any:
        """Return one factor for `like`, as `scalars` does."""
        return self.scalars([value], like, place)[0]

    def hyperparameter(self, value: Any) -> Any:
        """Return the value to give to the inner optimizer, so that it does not become a constant of a graph."""
        return value

    def numbers_as_inputs(self, inner: Optimizer) -> AbstractContextManager[object]:
        """Return a context for steps of `inner`, in which a coincidence of two numbers does not change the graph."""
        return nullcontext()

    def mark_step(self) -> None:  # noqa: B027 (a no-op on devices that execute eagerly)
        """End the current graph and run it. A no-op on devices that execute eagerly."""

    def host(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in host memory, detached; waits for the device. On the CPU it shares memory with `tensor`."""
        return tensor.detach().cpu()

    def print0(self, *values: object) -> None:
        """Print on rank 0 only."""
        if self.world.rank == 0:
            print(*values, flush=True)
