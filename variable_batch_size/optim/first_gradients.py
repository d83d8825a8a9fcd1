"""In which order gradients come in the first update, and whether they may leave before `step()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor


@final
class FirstGradients:
    """Counts the gradients of the microbatches of the first update, in which none leaves before `step()`.

    Args:
        parameters: all parameters of the optimizer.

    Attributes:
        once: whether each gradient came once for a microbatch, and stayed until `step()` as autograd left it.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.once = True
        self._parameters = list(parameters)
        self._came: list[tuple[int, Tensor]] = []  # index and checksum of the gradients since the last `step()`
        self._known: list[int] = []  # indices of those of the last microbatch

    def count(self, index: int) -> None:
        """Count a gradient, which autograd has just added."""
        self._came.append((index, checksum(self._parameters[index].grad)))

    def end_microbatch(self, *, alone: bool, replay: bool) -> None:
        """Take what has come for a microbatch.

        Args:
            alone: whether nothing but `backward()` changes gradients, as a `GradScaler` does.
            replay: whether the microbatch is a replay, whose gradients do not count.
        """
        order = [index for index, _ in self._came]
        self.once = self.once and alone and len(set(order)) == len(order) and self._stayed()
        self._known = self._known if replay else order
        self._came = []

    def drop(self) -> None:
        """Drop what has come since the last microbatch, in a loop that would do so again."""
        self.once &= not self._came
        self._came = []

    def forget(self) -> None:
        """Drop what has come since the last microbatch."""
        self._came = []

    def row(self) -> list[int]:
        """Return the indices in the order of the last microbatch, and -1 for parameters without a gradient."""
        known = dict.fromkeys(self._known)
        return [*known, *(len(self._parameters) - len(known)) * [-1]]

    def _stayed(self) -> bool:
        """Return whether the gradients are as they came; waits for the device."""
        if not self._came:
            return True
        then = torch.stack([number.cpu() for _, number in self._came])
        now = torch.stack([checksum(self._parameters[index].grad).cpu() for index, _ in self._came])
        return torch.allclose(now, then, rtol=0, atol=0, equal_nan=True)


def checksum(gradient: Tensor | None) -> Tensor:
    """Return a number that sees changes of `.data`, which have no version, 0-D: the sum of the elements."""
    if gradient is None or gradient.layout is not torch.strided:
        return torch.zeros((), dtype=torch.float64)
    gradient = gradient.detach()
    real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return real.sum().double()
