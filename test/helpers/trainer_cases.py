"""The trainings of the yardstick that Accelerate and Ignite go through."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from helpers.yardstick import MAX_GRAD_NORM, SIZES, UPDATES, by_hand, network, weights


@dataclass(frozen=True)
class Case:
    """A training of the yardstick."""

    inner: str = "adamw"
    rule: str = "root"
    clip: float | None = None
    schedule: bool = True
    dropout: float = 0.0
    adaptive: bool = False

    def make_inner(self, model: nn.Module) -> Any:
        return AdamW(model.parameters(), lr=0.01) if self.inner == "adamw" else SGD(model.parameters(), 0.1, 0.9)

    def scheduler(self, inner: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(inner, 4, 0.8) if self.schedule else None


CASES = [
    Case(),
    Case("sgd", clip=MAX_GRAD_NORM),
    Case("sgd", "adascale", clip=MAX_GRAD_NORM),
    Case("adamw", "adascale"),
    Case("adamw", "linear", schedule=False, clip=MAX_GRAD_NORM),
]


def chosen(input: Any) -> int:
    """A controller: the batch size goes up and down with the updates."""
    return 10 + 7 * (input.updates % 5)


@cache
def expected(case: Case, sizes: tuple[int, ...] = tuple(SIZES), updates: int = UPDATES) -> tuple[Tensor, list[float]]:
    """The weights after a training by hand, and the loss of each update."""
    model = network()
    inner = case.make_inner(model)
    losses = by_hand(
        model,
        inner,
        rule=case.rule,
        max_grad_norm=case.clip,
        scheduler=case.scheduler(inner),
        sizes=sizes,
        updates=updates,
    )
    return weights(model), losses
