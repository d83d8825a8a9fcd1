"""The interface of a backend: one sum over all ranks, and copies to the host."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size.backend.numbers_as_inputs import NumbersAsInputs
from variable_batch_size.backend.sent_numbers import SentNumbers
from variable_batch_size.world import World

_WIDE = torch.float64, torch.complex128
_servers: list[dist.Store] = []  # stores of this process, kept until it ends: other ranks may read later than this one


def scalar_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of 0-D factors and sums for these tensors: float64 if any has 64-bit numbers, else float32."""
    return torch.float64 if any(tensor.dtype in _WIDE for tensor in tensors) else torch.float32


class Backend(ABC):
    """What differs between one process, `torch.distributed` and PyTorch/XLA.

    A subclass implements `all_reduce_sum`, through which ranks find a store. It overrides the others if its device
    needs or has a better way.

    Args:
        world: this rank, and the number of ranks.
        sent: how numbers reach a device that compiles graphs; None for one that executes eagerly.

    Attributes:
        world: this rank, and the number of ranks.
        threads: whether ranks may be threads of one process, which have the disk of rank 0.
        elastic: whether the world may change between two updates, see `ElasticBackend`.
        while_waiting: called every second while the host waits in a sum, if the backend can; an error in it ends the
            wait.
    """

    threads: ClassVar[bool] = False
    elastic: ClassVar[bool] = False

    def __init__(self, world: World, sent: SentNumbers | None = None) -> None:
        self.world, self._sent = world, sent
        self.while_waiting: Callable[[], object] = lambda: None

    # Collectives: every rank has to call them, in the same order. -------------------------------------------------

    @abstractmethod
    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, in place, with one collective per dtype.

        Args:
            tensors: of the same shapes and dtypes on every rank.
        """

    def _gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank, through two sums, while the ranks have no store.

        The first sum exchanges the lengths, the second one the bytes: in each, a rank fills its own row and leaves
        zeros in the rows of the others.
        """
        world = self.world
        lengths = torch.zeros(world.size, dtype=torch.int64)
        lengths[world.rank] = len(message)
        self.all_reduce_sum([lengths])
        rows = torch.zeros(world.size, int(lengths.max()), dtype=torch.uint8)
        rows[world.rank].numpy().data[: len(message)] = message
        self.all_reduce_sum([rows])
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def store(self) -> dist.Store:
        """Return a key-value store that all ranks share, through which they communicate without a collective.

        Rank 0 starts its server, on a free port, and tells the others where it is.
        """
        if self.world.size == 1:
            return dist.HashStore()
        hosts = self._gather_bytes(socket.gethostname().encode())
        host = hosts[0].decode() if len(set(hosts)) > 1 else "localhost"  # of rank 0, which has the server
        server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if self.world.rank == 0 else None
        port = int(self._gather_bytes(b"%d" % (server.port if server else 0))[0])
        if server is not None:
            _servers.append(server)
        return server or dist.TCPStore(host, port, is_master=False)

    @property
    def job(self) -> Backend:
        """The backend of all ranks that agree on when to stop and save, and on batch sizes; usually this backend."""
        return self

    @property
    def rank_has_ended(self) -> bool:
        """Whether it is known that a rank has ended, so that a wait for it would not end."""
        return False

    @property
    def alone(self) -> bool:
        """Whether there is no other rank, and never will be."""
        return self.world.size == 1 and not self.elastic

    @property
    def leads(self) -> bool:
        """Whether this rank decides and writes for all."""
        return self.job.world.rank == 0

    # The device. --------------------------------------------------------------------------------------------------

    @property
    def static_graph(self) -> bool:
        """Whether every update must issue the same operations, as the device compiles graphs; numbers are tensors."""
        return self._sent is not None

    @property
    def device(self) -> torch.device:
        """A device whose tensors the ranks can sum, for numbers that are on no device yet."""
        return torch.device("cpu")

    @final
    def reads(self, tensor: Tensor) -> bool:
        """Return whether the host can read a tensor without a wait: it is on the CPU, and no graph computes it."""
        return self._sent is None and tensor.device.type == "cpu"

    def scalars(self, values: Sequence[float], like: Tensor, place: str = "") -> Sequence[Any]:
        """Return Python numbers as factors for the tensor `like`, which do not become constants of a compiled graph.

        Tensors are float64 for a float64 `like`, otherwise float32: the product with one in half precision is computed
        in float32 and rounded once, as with a Python number.

        Args:
            values: Python numbers.
            like: tensor whose device and dtype the factors must fit.
            place: name of the place in the graphs that use the factors, if they are often the same ones; a graph has
                each place once. A number that was sent there before is not sent again.

        Returns:
            `values` themselves if the device compiles no graphs, otherwise 0-D tensors.
        """
        if self._sent is None:
            return values
        dtype = scalar_dtype([like])
        return self._sent.tensors(values, dtype, like.device, place)

    def vectors(self, rows: Sequence[Sequence[float]], like: Tensor, place: str) -> Sequence[Tensor]:
        """Return rows of numbers as 1-D tensors of the device and dtype of `like`, without a wait for the device.

        All rows go to the device in one copy, from pinned memory to a GPU.

        Args:
            rows: Python numbers, as many in each row.
            like: tensor whose device and dtype they get.
            place: see `scalars`.
        """
        if self._sent is not None:
            return self._sent.tensors([*map(tuple, rows)], like.dtype, like.device, place)
        packed = torch.tensor(rows, dtype=like.dtype)
        packed = packed.pin_memory() if like.is_cuda else packed
        return packed.to(like.device, non_blocking=True).unbind()

    @final
    def scalar(self, value: float, like: Tensor, place: str = "") -> Any:
        """Return a Python number as a factor for a tensor, which does not become a constant of a graph; see `scalars`.

        Args:
            value: the number.
            like: tensor whose device and dtype the factor must fit.
            place: name of the place in the graphs that use the factor.
        """
        return self.scalars([value], like, place)[0]

    @final
    def number(self, value: Tensor | float, like: Tensor, place: str = "") -> Any:
        """Return a user's number, a float or a tensor with one element on any device, as a factor for `like`.

        A tensor on the host is read there, because one of 0 or 1 that is moved would be a constant of a graph. One on a
        device stays there, 0-D, unless the host may read both.

        Args:
            value: the number.
            like: see `scalars`, as for `place`.
        """
        if not isinstance(value, Tensor):
            return self.scalar(value, like, place)
        is_moved = value.device.type == "cpu" and like.device.type != "cpu"
        if is_moved or self.reads(like):
            return self.scalar(value.item(), like, place)
        return value.detach().reshape(()).to(like.device, scalar_dtype([like]))

    def hyperparameter(self, value: Any) -> Any:
        """Return the value to give to the inner optimizer, so that it does not become a constant of a graph."""
        return value

    def numbers_as_inputs(self, inner: Optimizer, *, unread: bool = False) -> AbstractContextManager[object]:
        """Return a context for steps of an optimizer in which each number is an input of the graph, and no constant.

        A changed learning rate then needs no new graph. On devices that compile no graphs the context does nothing.

        Args:
            inner: the optimizer of torch.
            unread: whether numbers that are on the device already stay there, see `NumbersAsInputs`.
        """
        if self._sent is None:
            return nullcontext()
        return NumbersAsInputs(inner, self.scalar, self._sent.device_type, unread=unread)

    def mark_step(self) -> None:  # noqa: B027 (a no-op on devices that execute eagerly)
        """End the current graph and run it. A no-op on devices that execute eagerly."""

    def seed(self, seed: int) -> None:  # noqa: B027 (torch seeds all devices but those that compile graphs)
        """Seed the generator of this rank's device, if torch.manual_seed does not."""

    def host(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in host memory, detached; waits for the device. On the CPU it shares memory with `tensor`."""
        return tensor.detach().cpu()

    def print0(self, *values: object) -> None:
        """Print on rank 0 only."""
        if self.world.rank == 0:
            print(*values, flush=True)
