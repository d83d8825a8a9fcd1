"""The backend of processes that `torch.distributed` connects: gloo, NCCL, XCCL or TorchTPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from variable_batch_size.backend.base import Backend
from variable_batch_size.backend.flat_messages import FlatMessages
from variable_batch_size.backend.sent_numbers import SentNumbers
from variable_batch_size.world import World


@final
class DistributedBackend(Backend):
    """The ranks of a process group.

    Args:
        group: process group to which this process belongs. Default: the default process group.
        job: whether the ranks of the default process group agree on when to stop and save, although only ranks in
            `group` sum gradients.
        sent: how numbers are sent to a device that compiles graphs; None for other devices.

    Raises:
        ValueError: if no process group is initialized, or this process does not belong to `group`.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, job: bool = False, sent: SentNumbers | None = None
    ) -> None:
        """Take rank and size of the world from the process group."""
        super().__init__(World(dist.get_rank(group), dist.get_world_size(group)), sent)
        self._group, self._of_job = group, job
        self._messages = FlatMessages()

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum the tensors over all ranks, in place, as one flat message per dtype and device."""
        if self.world.size == 1:
            return

        def reduce(flat: Tensor) -> None:
            self._wait_for_sum(dist.all_reduce(flat, group=self._group, async_op=True), flat)

        self._messages.reduce_flat(tensors, reduce)

    def _gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank, through one collective."""
        messages: list[Any] = [message] * self.world.size
        dist.all_gather_object(messages, message, group=self._group)
        return messages

    def store(self) -> dist.Store:
        """Return the store through which the ranks of the group found one another."""
        return self._own_group().get_group_store()

    @property
    def ranks(self) -> list[int]:
        """The ranks of the group, as the default process group numbers them."""
        return dist.get_process_group_ranks(self._own_group())

    @property
    def job(self) -> Backend:
        """The backend of all ranks of the default process group, if the argument `job` was True; otherwise this one."""
        return DistributedBackend() if self._of_job else self

    @property
    def device(self) -> torch.device:
        """The CPU if the process group has a backend for it, otherwise its accelerator."""
        kinds = [entry.split(":")[0] for entry in dist.get_backend_config(self._group).split(",")]
        return torch.device("cpu" if "cpu" in kinds else kinds[0])

    def _own_group(self) -> dist.ProcessGroup:
        """Return the process group of this backend: the one that was passed, or the default one."""
        group = self._group or dist.group.WORLD
        assert group is not None  # for mypy: the constructor has raised otherwise
        return group

    def _wait_for_sum(self, work: Any, flat: Tensor) -> None:
        """Wait for the sum of a tensor; on the CPU, where the host waits, call `while_waiting` every second.

        Args:
            work: what the asynchronous all-reduce returned.
            flat: the tensor.
        """
        while flat.device.type == "cpu":
            with suppress(RuntimeError):  # the second is over, or the sum has failed
                work.wait(timedelta(seconds=1))
                return
            self.while_waiting()  # also if the sum has failed: its error says better why, if a rank has ended
            if work.is_completed():
                break
        work.wait()  # raises the error of a sum that has failed
