"""How many operations does an update dispatch? Deterministic on any machine: on a GPU each is a kernel, or nearly.

Twenty parameters are trained by SGD with foreach operations, by a loop by hand and by the library's rules. Operations
that only make another view of a tensor, and the backward's own, count too. Each number is that of one update.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from results import record

LAYERS, WIDTH, ROWS = 10, 16, 8
RULES: dict[str, dict[str, Any]] = {
    "linear": {"rule": "linear"},
    "adascale": {"rule": "adascale"},
    "adascale, differenced": {"rule": "adascale", "noise": "differenced"},
    "adamscale": {"rule": "adamscale"},
}


class Operations(TorchDispatchMode):
    """Counts what is dispatched within a block."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, and call it."""
        self.number += 1
        return func(*args, **(kwargs or {}))


def network() -> nn.Sequential:
    """Return a network of twenty parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return a mean over rows."""
    return model(rows).square().mean()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of torch."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)


def by_hand(microbatches: int) -> int:
    """Return the operations of an update of a loop without the library."""
    model = network()
    optimizer, rows = inner(model), torch.randn(ROWS, WIDTH)

    def update() -> None:
        optimizer.zero_grad()
        for _ in range(microbatches):
            (loss_of(model, rows) / microbatches).backward()
        optimizer.step()

    update()
    with Operations() as found:
        update()
    return found.number


def of_rule(options: dict[str, Any], microbatches: int) -> int:
    """Return the operations of the third update under a rule."""
    model, data = network(), TensorDataset(torch.randn(ROWS * microbatches * 3, WIDTH))
    sampler = vbs.CustomSampler(data, ROWS * microbatches, 1, 0, ROWS, shuffle=False)
    optimizer = vbs.CustomOptimizer(inner(model), sampler, ROWS, **options)
    found = Operations()
    for (rows,) in DataLoader(data, batch_sampler=sampler):
        with found if optimizer.updates == 2 else nullcontext():
            optimizer.backward(loss_of(model, rows))
            optimizer.step()
    return found.number


def main() -> None:
    """Count, and record it."""
    for microbatches in (1, 4):
        hand = by_hand(microbatches)
        own = {"on": f"{2 * LAYERS} parameters, SGD", "where": "CPU", "case": f"microbatches: {microbatches}"}
        record("operations of an update", "by hand", hand, "operations", **own)
        for name, options in RULES.items():
            more = of_rule(options, microbatches) - hand
            record("operations of an update", f"{name} - by hand", more, "operations", **own)


if __name__ == "__main__":
    main()
