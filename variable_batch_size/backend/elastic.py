"""The interface of a backend whose world may change between two updates."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, final

from variable_batch_size.backend.base import Backend
from variable_batch_size.backend.local import LocalBackend
from variable_batch_size.world import World


@final
class BrokenStepError(RuntimeError):
    """Raised if a sum over the ranks is not valid, so that the step has to be repeated."""


class ElasticBackend(Backend):
    """Ranks that come and go: `vbs.updates` asks for the world of each update, and a sum that breaks is repeated.

    An update has one sum, `all_reduce_sum`, which raises `BrokenStepError` unless all ranks have got it. No store
    outlives a change of the ranks, so that what they agree on is sent with the sums.

    Args:
        job: the ranks that come and go together, as a group. Default: this rank alone. If a group shards the gradients,
            each rank of it sums its part over the ranks of other groups that have the same part.

    Attributes:
        facts: what all ranks of the next sum must have in common, by name.
        posted: a text that the next sum brings to all ranks, if this rank is of the first group.
        received: the text that the last sum has brought.
    """

    elastic: ClassVar[bool] = True

    def __init__(self, job: Backend | None = None) -> None:
        """Begin with a world of this rank alone, which `meet` replaces."""
        super().__init__(World())
        self._job = job or LocalBackend()
        self.facts: dict[str, Any] = {}
        self.posted, self.received = "", ""

    @property
    def job(self) -> Backend:
        """The backend of the ranks that come and go together with this one."""
        return self._job

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one of the present world."""
        return self.world.rank == 0

    @abstractmethod
    def meet(self, updates: int) -> bool:
        """Find the `world` of the next update, and return whether this rank has got a state from another one.

        Ranks may have gone or come since the last update; one that has just come gets the state of the others. Calls
        after the first one and before the sum of that update have no effect.

        Args:
            updates: number of updates that this rank has made.
        """

    def part(self, updates: int) -> None:
        """Leave after the last update, number `updates`, when every other rank has made it."""
