"""One process alone: it communicates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from variable_batch_size.backend.base import Backend
from variable_batch_size.world import World


@final
class LocalBackend(Backend):
    """A world of one: every sum over it is the summand."""

    def __init__(self) -> None:
        super().__init__(World())

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""
