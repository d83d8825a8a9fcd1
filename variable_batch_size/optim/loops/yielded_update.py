"""What a loop over `updates` gets, and the errors of loops that do not train on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar, final

from variable_batch_size.data.batches import Batch

T = TypeVar("T")


@final
class Update(Generic[T]):
    """The microbatches of this rank in one update. Iterate over them once; `len()` returns their number."""

    def __init__(self, microbatches: Iterator[T], batch: Batch) -> None:
        self._microbatches, self._batch = microbatches, batch

    @property
    def batch_size(self) -> int:
        """The batch size of the update, over all ranks, in the unit of the trace."""
        return self._batch.batch_size

    @property
    def counts(self) -> Mapping[str, Any]:
        """The total of each count over all microbatches and ranks, by name: divide the terms of the loss by these.

        The totals are floats if the parameters are on the CPU, otherwise 0-D tensors on their device. A total of 0 is
        replaced by inf.

        Raises:
            RuntimeError: without `updates(counts=)`.
        """
        if self._batch.totals is None:
            raise RuntimeError(
                "update.counts needs counts, but vbs.updates() has none; pass counts=, a function of a microbatch that "
                "returns a dict"
            )
        return self._batch.totals

    def __len__(self) -> int:
        return len(self._batch.microbatches)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={self.batch_size}, {len(self)} microbatches)"

    def __iter__(self) -> Iterator[T]:
        return self._microbatches


def incomplete_update(update: int) -> RuntimeError:
    """Return the error for a loop that asks for the next update although this one, of this number, is not made."""
    return RuntimeError(
        f"update {update} is not complete, but the loop asks for the next one; loop over its microbatches and call "
        "step() for each (with gradient 0 for a nan loss), or discard_step() and begin a new loop"
    )


def stale_loop() -> RuntimeError:
    """Return the error for a loop that continues after `discard_step()` or `load_state_dict()` of the optimizer."""
    return RuntimeError(
        "the loop must end after discard_step() or load_state_dict(), but it asks for another update; break, and begin "
        "a new loop over vbs.updates"
    )
