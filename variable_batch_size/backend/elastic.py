"""The interface of a backend whose world may change between two updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, final

from variable_batch_size.backend.base import Backend
from variable_batch_size.backend.local import LocalBackend
from variable_batch_size.world import World


@final
class BrokenStepError(RuntimeError):
    """A sum over the ranks does not hold, and the world that was asked for it is over: the step is made again."""


class ElasticBackend(Backend):
    """Ranks that come and go: `vbs.updates` asks for the world of each update, and a sum that breaks is made again.

    No store outlives a change of the ranks, so that what they agree on travels in the sums. `all_reduce_sum` raises
    `BrokenStepError` if its sum does not hold, and keeps what `posted` has of rank 0 in `received` if it does.

    Attributes:
        posted: a text, which the next sum carries from rank 0 to all.
        received: the text that the last sum has carried.
    """

    elastic: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(World())
        self.posted, self.received = "", ""

    @property
    def job(self) -> Backend:
        """This rank alone."""
        return LocalBackend()

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one of the present world."""
        return self.world.rank == 0

    @abstractmethod
    def meet(self, updates: int) -> bool:
        """Find the `world` of the update that follows this number of them; return whether a state was loaded.

        It may be called again before the sum of that update, without effect.
        """

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Say what all ranks of the next sum must have in common, by name."""

    def part(self, updates: int) -> None:
        """Leave after the last update, when every other rank has made it."""
