"""What a loop over `updates` gets, and the errors of loops that do not train on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class Update(Generic[T]):
    """This rank's microbatches of one update, read as they are asked for, once; its `len` is their number."""

    def __init__(self, microbatches: Iterator[T], number: int) -> None:
        self._microbatches, self._number = microbatches, number

    def __len__(self) -> int:
        return self._number

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._number} microbatches)"

    def __iter__(self) -> Iterator[T]:
        return self._microbatches


def incomplete(update: int) -> RuntimeError:
    """Return the error of a loop that asks for the next update when this one is not made."""
    return RuntimeError(
        f"every microbatch of an update must reach optimizer.step(), but the loop asks for the next update and update "
        f"{update} is not complete; call step() once for each microbatch, also for one whose loss is nan (give it a "
        f"gradient of 0), and pass ahead= if a framework or a thread reads updates early; or call "
        f"optimizer.discard_step() and begin a new loop"
    )


def stale() -> RuntimeError:
    """Return the error of a loop that goes on after the optimizer has moved."""
    return RuntimeError(
        "the loop must end after discard_step() or load_state_dict(), but it asks for another update; break, and begin "
        "a new loop over vbs.updates"
    )
