"""The interface of a backend whose world may change between two updates."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, final

from variable_batch_size.backend.base import Backend
from variable_batch_size.backend.local import LocalBackend
from variable_batch_size.world import World


@final
class BrokenStepError(RuntimeError):
    """A sum over the ranks does not count: the step is made again."""


class ElasticBackend(Backend):
    """Ranks that come and go: `vbs.updates` asks for the world of each update, and a sum that breaks is made again.

    An update has one sum, `all_reduce_sum`, which raises `BrokenStepError` unless it counts. No store outlives a change
    of the ranks, so that what they agree on travels in the sums.

    Args:
        job: the ranks that come and go together. Default: this rank alone. Such ranks sum by themselves what they have
            of the gradients, so that each of them sums its part over those that have the same one elsewhere.

    Attributes:
        facts: what all ranks of the next sum must have in common, by name.
        posted: a text, which the next sum carries from rank 0 to all, of other jobs to the first rank.
        received: the text that the last sum has carried.
    """

    elastic: ClassVar[bool] = True

    def __init__(self, job: Backend | None = None) -> None:
        super().__init__(World())
        self._job = job or LocalBackend()
        self.facts: dict[str, Any] = {}
        self.posted, self.received = "", ""

    @property
    def job(self) -> Backend:
        """The ranks that come and go together."""
        return self._job

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one of the present world."""
        return self.world.rank == 0

    @abstractmethod
    def meet(self, updates: int) -> bool:
        """Find the `world` of the update that follows this number of them; return whether a state was loaded.

        It may be called again before the sum of that update, without effect.
        """

    def part(self, updates: int) -> None:
        """Leave after the last update, when every other rank has made it."""
