"""The backend of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from variable_batch_size.backend.base import Backend
from variable_batch_size.world import World


@final
class LocalBackend(Backend):
    """A world of one rank, which communicates with no other.

    >>> LocalBackend().world
    World(rank=0, size=1)
    """

    def __init__(self) -> None:
        super().__init__(World())

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: there is only one rank."""
