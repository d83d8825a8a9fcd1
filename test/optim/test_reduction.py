"""Gradients that are summed in buckets while `backward()` runs: the same updates as without, and when they leave."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.reference import (
    ADAM,
    HYPERPARAMETERS,
    REF,
    SGD,
    Training,
    examples,
    filled,
    training,
)
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks

TINY = 4e-5  # MB: buckets of some parameters


class Odd(nn.Module):
    """Layers of two dtypes, some of them tied, and one for rare samples; their order is not that of their names."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(4, 4).to(rng.choice([torch.float32, torch.float64])) for _ in range(5))
        self.calls = [rng.randrange(4) for _ in range(rng.randint(1, 7))]  # the last layer is the rare one
        self.first, self.last, self.unused = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        for number in self.calls:
            layer = self.layers[number]
            y = y + torch.tanh(layer(y.to(layer.weight.dtype))).double()  # type: ignore[operator, arg-type]
        chosen = x[:, 0] > 1
        if chosen.any():
            layer = self.layers[4]
            y = y.index_add(0, chosen.nonzero()[:, 0], layer(y[chosen].to(layer.weight.dtype)).double())  # type: ignore[operator, arg-type]
        return self.last(y)  # type: ignore[no-any-return]


INNER: dict[str, Any] = {
    "SGD": lambda parameters, **_: torch.optim.SGD(parameters, **SGD),
    "AdamW": lambda parameters, **_: torch.optim.AdamW(parameters, **ADAM),
    "RMSprop": lambda parameters, **_: torch.optim.RMSprop(parameters, **HYPERPARAMETERS[torch.optim.RMSprop]),
}
RULES: list[tuple[str, Any]] = [
    *((rule, "SGD") for rule in ("constant", "linear", "linear-momentum", "root", "adascale")),
    ("sqrt-sde", "RMSprop"),
    ("adamscale", "AdamW"),
]


def odd(backend: Backend, seed: int, sizes: Sequence[int], rule: str, inner: str, **options: Any) -> Training:
    return training(
        vbs.CustomOptimizer,
        sizes,
        model=filled(Odd(seed)),
        inner=INNER[inner],
        hyperparameters={},
        backend=backend,
        rule=rule,
        ref_batchsize=REF,
        **{"find_unused_parameters": True, "minibatch_size": 3, "bucket_cap_mb": TINY, **options},
    )


def loop(run: Training, updates: int, *, count: bool = False, log: bool = False) -> list[Tensor]:
    """Train, and return what was logged."""
    logged: list[Tensor] = []
    while run.optimizer.updates < updates:
        run.sampler.set_epoch(run.optimizer.epoch)
        run.optimizer.set_epoch(run.optimizer.epoch)
        for indices in run.sampler:
            loss = run.loss(indices)
            loss.backward()
            if log:
                run.optimizer.log(loss=loss / len(indices), first=indices[0])
            run.optimizer.step(**({"count": sum(indices) + 1} if count else {}))
            if not run.optimizer.inside_step:
                logged += [*run.optimizer.logged.values()]
                logged += [] if run.optimizer.grad_norm is None else [run.optimizer.grad_norm]
                if run.optimizer.updates >= updates:
                    break
    return logged


@given(
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=6),
    rule=st.sampled_from(RULES),
    world=st.sampled_from([2, 2, 3]),
    megabytes=st.sampled_from([0, TINY, 25]),
    log=st.booleans(),
    options=st.sampled_from(
        [
            {},
            {"max_grad_norm": 0.5},
            {"grad_norm": True},
            {"accumulation": "buffered"},
            {"noise": "differenced"},
            {"noise": "microbatches"},
            {"reduction": "sum"},
            {"reduction": "sum", "count": True},
        ]
    ),
)
@examples(40)
def test_updates_are_those_without_overlap(
    seed: int,
    sizes: list[int],
    rule: tuple[str, str],
    world: int,
    megabytes: float,
    log: bool,
    options: dict[str, Any],
) -> None:
    options = dict(options)
    count = options.pop("count", False)
    if count and "scale" in rule[0]:
        return

    def train(backend: Backend, overlap: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
        run = odd(backend, seed, sizes, *rule, overlap=overlap, bucket_cap_mb=megabytes, **options)
        logged = loop(run, len(sizes), count=count, log=log)
        return run.model.state_dict(), logged

    without = run_ranks(lambda backend: train(backend, False), world)
    for rank, other in zip(run_ranks(lambda backend: train(backend, True), world), without, strict=True):
        # The squares of the noise are added in another order.
        torch.testing.assert_close(rank, other, rtol=1e-6 if "scale" in rule[0] else 0, atol=0, equal_nan=True)
