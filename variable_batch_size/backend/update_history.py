"""Where a rank is in the training, and by which hyperparameters; and the sentence that says how two ranks differ."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, final

Groups = tuple[tuple[tuple[str, Any], ...], ...]  # names and values of the hyperparameters, by parameter group

_KEPT = 1024  # changes of position and hyperparameters, until they are compared


@final
class UpdateHistory:
    """The position and the hyperparameters of a rank after each of its last updates, as runs of equal ones."""

    def __init__(self) -> None:
        self._runs: deque[tuple[int, tuple[int, int, Groups]]] = deque(maxlen=_KEPT)  # by the update that begins one

    def add(self, update: int, step: int, epoch: int, groups: Groups) -> None:
        """Add an update: the next one."""
        run = step - update, epoch, groups
        if not self._runs or self._runs[-1][1] != run:
            self._runs.append((update, run))

    def text_after(self, update: int) -> str:
        """Return the position and the hyperparameters after an update, for `difference_in_words`; forget earlier."""
        while len(self._runs) > 1 and self._runs[1][0] <= update:
            self._runs.popleft()
        begins, run = self._runs[0] if self._runs else (update + 1, None)
        return json.dumps([update, *run]) if run is not None and begins <= update else ""

    @staticmethod
    def update_of(text: str) -> int:
        """Return the update of a result of `text_after`."""
        return int(json.loads(text)[0])


def difference_in_words(first: str, other: str, rank: int) -> str:
    """Return the sentence for how another rank differs from rank 0; "" if it does not, or it is too long ago to know.

    `first` and `other` are the results of `UpdateHistory.text_after` on both ranks, for the same update.
    """
    if first == other or not (first and other):
        return ""
    values, others = _by_name(*json.loads(first)), _by_name(*json.loads(other))
    for name in {**values, **others}:
        a, b = (named.get(name, "no number") for named in (values, others))
        if a != b and repr(a) != repr(b):  # nan equals nan
            remedy = "set it to one value on all ranks, and restore a checkpoint: the weights may differ, too"
            if name in ("epoch", "step"):
                remedy = "let all ranks end an epoch after the same update, and restore the same checkpoint"
            return differing_in_words(name, a, b, rank, remedy, f" after update {values['step']}")
    return ""


def differing_in_words(name: str, first: object, other: object, rank: int, remedy: str, when: str = "") -> str:
    """Return the sentence for a value that differs from that of rank 0."""
    return (
        f"all ranks must train with the same {name}, but it is {first} on rank 0 and {other} on rank {rank}{when}; "
        f"{remedy}"
    )


def _by_name(update: int, offset: int, epoch: int, groups: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Any]:
    """Return epoch, step and hyperparameters of an update by their names in an error."""
    named = {
        f"{name} of parameter group {number}": tuple(value) if isinstance(value, list) else value  # as it was
        for number, group in enumerate(groups)
        for name, value in group
    }
    return {"epoch": epoch, "step": update + offset, **named}
