"""How many operations does an update dispatch, and how many of them does a GPU compute? The same on any machine.

Twenty parameters are trained by SGD with foreach operations, by a loop by hand and by the library's rules. On the CPU
all operations count, also those that only make another view of a tensor, and the backward's own. For a GPU, only those
that compute or copy count, each of which starts a kernel, or a few; they are dispatched for tensors without data. Each
number is that of one update.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import variable_batch_size as vbs
from results import record

LAYERS, WIDTH, ROWS = 10, 16, 8
RULES: dict[str, dict[str, Any]] = {
    "linear": {"rule": "linear"},
    "adascale": {"rule": "adascale"},
    "adascale, differenced": {"rule": "adascale", "noise": "differenced"},
    "adamscale": {"rule": "adamscale"},
}


LOGGING: dict[str, dict[str, Any]] = {
    "log() of a loss": {"rule": "linear"},
    "grad_norm=True": {"rule": "linear", "grad_norm": True},
}
GPU = "meta"  # the device of tensors without data, which no host can read either


class Operations(TorchDispatchMode):
    """Counts what is dispatched within a block; with `computed`, without what only makes views or empty tensors."""

    def __init__(self, *, computed: bool = False) -> None:
        super().__init__()
        self.number = 0
        self._computed = computed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, and call it."""
        self.number += not (self._computed and _only_describes(func))
        return func(*args, **(kwargs or {}))


def _only_describes(func: Any) -> bool:
    """Return whether an operation computes nothing: it makes a view, an empty tensor, or a mark for a profiler."""
    makes_view = any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
    return makes_view or str(func).startswith(("profiler", "aten.new_empty", "aten.lift_fresh"))


def network(device: str) -> nn.Sequential:
    """Return a network of twenty parameters."""
    torch.manual_seed(0)
    layers = (layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, device=device), nn.Tanh()))
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return a mean over rows."""
    return model(rows).square().mean()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of torch."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)


def by_hand(microbatches: int, device: str = "cpu") -> int:
    """Return the operations of an update of a loop without the library."""
    model = network(device)
    optimizer, rows = inner(model), torch.ones(ROWS, WIDTH, device=device)

    def update() -> None:
        optimizer.zero_grad()
        for _ in range(microbatches):
            (loss_of(model, rows) / microbatches).backward()
        optimizer.step()

    update()
    with Operations(computed=device == GPU) as found:
        update()
    return found.number


def with_library(options: dict[str, Any], microbatches: int, device: str = "cpu", *, logs: bool = False) -> int:
    """Return the operations of the third update with these options of the optimizer, and `log()` if asked for."""
    model, rows = network(device), torch.ones(ROWS, WIDTH, device=device)
    sampler = vbs.CustomSampler(ROWS * microbatches * 3, ROWS * microbatches, 1, 0, ROWS, shuffle=False)
    optimizer = vbs.CustomOptimizer(inner(model), sampler, ROWS, **options)
    found = Operations(computed=device == GPU)
    for _ in sampler:
        with found if optimizer.updates == 2 else nullcontext():
            loss = loss_of(model, rows)
            optimizer.backward(loss)
            if logs:
                optimizer.log(loss=loss)
            optimizer.step()
    return found.number


def main() -> None:
    """Count, and record it."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    devices = ("CPU", "cpu"), ("GPU (counted without one)", GPU)
    for (where, device), microbatches in product(devices, (1, 4)):
        hand = by_hand(microbatches, device)
        own = {"on": f"{2 * LAYERS} parameters, SGD", "where": where, "case": f"microbatches: {microbatches}"}
        record("operations of an update", "by hand", hand, "operations", **own)
        for name, options in RULES.items():
            more = with_library(options, microbatches, device) - hand
            record("operations of an update", f"{name} - by hand", more, "operations", **own)
        linear = with_library(RULES["linear"], microbatches, device)
        for name, options in LOGGING.items():
            more = with_library(options, microbatches, device, logs="log" in name) - linear
            record("operations of an update", f"{name} - linear", more, "operations", **own)


if __name__ == "__main__":
    main()
