"""The ranks over which the gradients of an optimizer are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import OutOfMemoryError, Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import AbsentRankError


def absent_rank_error(error: Exception) -> RuntimeError:
    """Return the error of a rank that has waited for another one in vain; `error`: what torch has raised."""
    return RuntimeError(
        f"a rank does not take part in the sum of the gradients, and ranks may have made different updates; "
        f"restart all ranks from the last checkpoint: {error}"
    )


@final
class Ranks:
    """Sums tensors over the ranks of a backend.

    Attributes:
        backend: how they communicate.
        interrupted: whether an exception has interrupted a sum on this rank, which other ranks may have completed.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.interrupted = False

    @property
    def number(self) -> int:
        """The number of ranks."""
        return self.backend.world.size

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the ranks, in place. Every rank has to call it.

        If an exception interrupts it, `interrupted` stays True, unless ranks may come and go: other ranks may have
        completed the sum.
        """
        self.interrupted = self.number > 1
        try:
            self.backend.all_reduce_sum(tensors)
        except (AbsentRankError, OutOfMemoryError):  # both say what is wrong
            raise
        except RuntimeError as error:
            if self.backend.elastic:  # its error says what is wrong, and its other ranks continue without this one
                self.interrupted = False
                raise
            raise absent_rank_error(error) from error
        self.interrupted = False

    def check_not_interrupted(self) -> None:
        """Raise RuntimeError if a sum was interrupted: what other ranks have of it cannot be taken back."""
        if self.interrupted:
            raise RuntimeError(
                "a step must be discarded before its gradients are summed over the ranks, but an exception came during "
                "the sum; restart all ranks from the last checkpoint, or load a state on every rank"
            )
