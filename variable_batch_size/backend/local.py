"""The backend of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from variable_batch_size.backend.base import Backend
from variable_batch_size.backend.sent_numbers import SentNumbers
from variable_batch_size.world import World


@final
class LocalBackend(Backend):
    """A world of one rank, which communicates with no other.

    >>> LocalBackend().world
    World(rank=0, size=1)

    Args:
        job: the backend by which all ranks of a job agree, if it has several ranks that compute the same samples.
        sent: how numbers are sent to a device that compiles graphs; None for other devices.
    """

    def __init__(self, job: Backend | None = None, sent: SentNumbers | None = None) -> None:
        super().__init__(World(), sent)
        self._job = job

    @property
    def job(self) -> Backend:
        """The backend of all ranks of the job."""
        return self._job or self

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: there is only one rank."""
