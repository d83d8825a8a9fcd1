"""The interface of a backend whose world may change between two updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

from torch import Tensor

from variable_batch_size.backend.base import Backend
from variable_batch_size.backend.local import LocalBackend
from variable_batch_size.world import World


@final
class BrokenStepError(RuntimeError):
    """A sum over the ranks does not hold, or the world has changed before it: the step is made again."""


class ElasticBackend(Backend):
    """Ranks that come and go: `vbs.updates` asks for the world of each update, and a sum that breaks is made again.

    No store outlives a change of the ranks, so that what they agree on travels in the sums.

    An update has one sum, of messages that may follow one another while `backward()` runs: `begin_sum`, `send` for each
    flat message, and `end_sum`, which raises `BrokenStepError` if the sum does not hold, and keeps what `posted` has of
    rank 0 in `received` if it does.

    Args:
        job: the ranks that come and go together. Default: this rank alone. Such ranks sum by themselves what they have
            of the gradients, so that each of them sums its part over those that have the same one elsewhere.

    Attributes:
        posted: a text, which the next sum carries from rank 0 to all, of other jobs to the first rank.
        received: the text that the last sum has carried.
    """

    elastic: ClassVar[bool] = True

    def __init__(self, job: Backend | None = None) -> None:
        super().__init__(World())
        self._job = job or LocalBackend()
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

        It may be called again before the sum of that update, without effect. The world may be the last one, as long as
        it is not known whether it has changed; then the sum breaks if it has.
        """

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Say what all ranks of the next sum must have in common, by name."""

    @abstractmethod
    def begin_sum(self, like: Tensor, shapes: Sequence[object]) -> None:
        """Begin the sum of an update without waiting for other ranks.

        Args:
            like: a tensor on the device of the messages.
            shapes: of all messages, in words, which all ranks must have in common.
        """

    @abstractmethod
    def send(self, flat: Tensor) -> None:
        """Begin to sum a flat message in place; until `end_sum` has returned, its content is unknown."""

    @abstractmethod
    def end_sum(self, tensors: Sequence[Tensor], *, holds: bool = True) -> None:
        """Sum the last tensors in place, and wait for all messages; all ranks agree that the update counts.

        Args:
            tensors: at least one, small.
            holds: whether this rank has sent what it should; otherwise the sum breaks on all ranks.

        Raises:
            BrokenStepError: if it does not count.
        """

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Make the sum of an update, of these tensors alone."""
        self.begin_sum(tensors[0], [describe(tensor) for tensor in tensors])
        self.end_sum(tensors)

    def part(self, updates: int) -> None:
        """Leave after the last update, when every other rank has made it."""


def describe(tensor: Tensor) -> tuple[str, int]:
    """Return dtype and length of a message."""
    return str(tensor.dtype), tensor.numel()
