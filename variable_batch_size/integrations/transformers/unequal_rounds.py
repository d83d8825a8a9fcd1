"""Ranks with unequal numbers of microbatches, in a trainer that gathers values in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply


@final
class UnequalRounds:
    """Lets `accelerator.gather` be called within microbatches, of which some ranks have one less than others.

    Losses such as that of trl's SFTTrainer gather what they log in every microbatch, and the other ranks would wait for
    one that has none left. `catch_up` makes the missing calls with zeros, like those of the last microbatch. So does a
    microbatch that only repeats another one. Sums over the ranks are then exact.

    Args:
        accelerator: the accelerator, whose `gather` is replaced within a microbatch.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._gathered: list[Any] = []  # in the last microbatch

    @contextmanager
    def microbatch(self, *, counts: bool) -> Iterator[None]:
        """Watch what a microbatch gathers; `counts`: whether it is more than a repetition."""
        if self._accelerator.num_processes == 1:
            yield
            return
        self._gathered, gather = [], self._accelerator.gather

        def watched(values: Any) -> Any:
            self._gathered.append(values)
            return gather(values if counts else _zeros(values))

        self._accelerator.gather = watched
        try:
            yield
        finally:
            del self._accelerator.gather  # the method of the class is there again

    def catch_up(self, missing: int) -> None:
        """Gather zeros for so many microbatches that only other ranks have."""
        for values in self._gathered * missing:
            self._accelerator.gather(_zeros(values))


def _zeros(values: Any) -> Any:
    return recursively_apply(torch.zeros_like, values)
