"""Batches that arrive at the ranks in random sizes, and the plain loop over the same rows, whole."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.reference import Array, network

Loss = Literal["mean of rows", "sum of rows", "mean of tokens", "sum of tokens", "late counts"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
SGD = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.01}
REF = 20
Batch = tuple[Tensor, Tensor, Tensor]  # x, target, and tokens of each row


@dataclass(frozen=True)
class Arriving:
    """A training of batches that arrive."""

    seed: int
    world: int
    loss: Loss
    minibatch_size: int | None  # None: by tokens
    fixed_shape: bool = False
    shared: bool = False
    largest: int = 40  # rows of a rank in an update

    @staticmethod
    def drawn(seed: int, world: int) -> Arriving:
        rng = random.Random(seed)
        rows = rng.choice([None, 1, 2, 5, 16])
        fixed = rows is not None and rng.random() < 0.4
        largest = rng.choice([3, 40, 300])
        return Arriving(seed, world, rng.choice(LOSSES), rows, fixed, rng.random() < 0.25, largest)

    def batches(self) -> list[list[Batch]]:
        """The rows of each update, by rank."""
        rng, generator = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        found = []
        for _ in range(6):
            sizes = [rng.choice([0, 0, 1, rng.randrange(5), rng.randrange(self.largest)]) for _ in range(self.world)]
            found.append([self._rows(size, generator) for size in sizes])
        return found

    def _rows(self, size: int, generator: torch.Generator) -> Batch:
        x, target = (torch.randn(size, n, generator=generator, dtype=torch.float64) for n in (3, 2))
        return x, target, torch.randint(0, 9, (size,), generator=generator)

    def source(self, world: vbs.backend.Backend) -> vbs.ArrivingBatches:
        options: dict[str, Any] = {"counts": tokens} if self.loss in ("mean of tokens", "sum of tokens") else {}
        if self.minibatch_size is None:
            options |= {"max_tokens": 20, "lengths": tokens}
        else:
            options |= {"minibatch_size": self.minibatch_size, "fixed_shape": self.fixed_shape}
        place = {"num_replicas": world.world.size, "rank": world.world.rank}
        return vbs.ArrivingBatches(shared=self.shared, **options, **place)

    def of(self, microbatch: Batch, model: nn.Module) -> tuple[Tensor, Tensor]:
        """The loss of a microbatch, and its count."""
        x, target, number = microbatch
        each = (model(x) - target).square().sum(dim=1)
        if "row" in self.loss:
            return each.mean() if "mean" in self.loss else each.sum(), number.sum()
        total = (each * number).sum()
        return total / number.sum() if "mean" in self.loss else total, number.sum()

    def train(self, backend: vbs.backend.Backend, model: nn.Module, **options: Any) -> vbs.CustomOptimizer:
        """Train a model on this rank's rows."""
        options.setdefault("reduction", "mean" if "mean" in self.loss else "sum")
        inner, source = torch.optim.SGD(model.parameters(), **SGD), self.source(backend)
        optimizer = vbs.LinearRuleOptimizer(inner, source, REF, backend=backend, model=model, **options)
        for update in vbs.updates(self.brought(backend.world.rank), optimizer):
            for microbatch in update:
                loss, count = self.of(microbatch, model)
                optimizer.backward(loss)
                optimizer.step(count=float(count) if self.loss == "late counts" else None)
        return optimizer

    def brought(self, rank: int) -> Iterator[Batch | None]:
        """What a rank brings: some bring None for no rows, and some end early."""
        own = [whole(ranks) if self.shared else ranks[rank] for ranks in self.batches()]
        while own and not len(own[-1][0]) and rank % 2:
            own.pop()
        for batch in own:
            yield batch if len(batch[0]) or rank % 3 else None

    def expected(self) -> tuple[list[Array], int, int]:
        """The weights of the plain loop over whole batches, its samples, and its updates."""
        model, samples, updates = network(), 0, 0
        inner = torch.optim.SGD(model.parameters(), **SGD)
        for ranks in self.batches():
            x, _, number = batch = whole(ranks)
            size = int(number.sum()) if self.loss in ("mean of tokens", "sum of tokens") else len(x)
            if size == 0:
                continue
            samples, updates = samples + size, updates + 1
            if "row" not in self.loss and not number.sum():  # an update without tokens leaves the weights
                continue
            inner.zero_grad()
            loss, count = self.of(batch, model)
            (loss if "mean" in self.loss else loss / (len(x) if "row" in self.loss else count)).backward()
            inner.param_groups[0]["lr"] = SGD["lr"] * size / REF
            inner.step()
        return [parameter.detach().numpy() for parameter in model.parameters()], samples, updates


def tokens(batch: Batch) -> Tensor:
    """The tokens of each row."""
    return batch[2]


def whole(ranks: list[Batch]) -> Batch:
    """The rows of all ranks."""
    return cast(Batch, tuple(torch.cat(fields) for fields in zip(*ranks, strict=True)))
