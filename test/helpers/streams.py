"""Streams of random parts, in any world, and the rows that each update must take, found one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import variable_batch_size as vbs

LR = 0.1


class Parts:
    """Whole numbers in parts of random sizes, another division in each pass."""

    def __init__(self, rows: Sequence[int], seed: int) -> None:
        self.rows, self.seed, self.epoch, self.epochs = rows, seed, 0, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Tensor]:
        return self.read(0, random.Random(f"{self.seed} {self.epoch}"))

    def read(self, begin: int, rng: random.Random) -> Iterator[Tensor]:
        while begin < len(self.rows):
            size = rng.choice([1, 2, 7, 30])
            yield torch.tensor([*self.rows[begin : begin + size]])
            begin += size


class StatefulParts(Parts):
    """With a state."""

    begin = at = 0

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.begin = self.begin, 0
        for rows in self.read(begin, random.Random(self.seed)):
            begin += len(rows)
            self.at = begin
            yield rows

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


def streams_of(lengths: Sequence[int], seed: int) -> list[Parts]:
    """Streams of these numbers of rows; row i of stream s is 1000 s + i. Every second one has a state."""
    kinds = [(Parts, StatefulParts)[(number + seed) % 2] for number in range(len(lengths))]
    return [
        kind(range(1000 * number, 1000 * number + length), seed + number)
        for number, (kind, length) in enumerate(zip(kinds, lengths, strict=True))
    ]


def tokens_of(rows: Tensor) -> Tensor:
    """What rows count, from 0 to 4."""
    return rows * 7 % 5


def expected_rows(lengths: Sequence[int], sizes: Iterator[int], *, tokens: bool) -> list[list[int]]:
    """The rows of each update of a pass, in their order: one row, or token, after another of the next stream."""
    streams = [[1000 * number + row for row in range(length)] for number, length in enumerate(lengths)]
    counts = {row: int(tokens_of(torch.tensor(row))) if tokens else 1 for rows in streams for row in rows}
    updates = []
    while any(counts[row] for rows in streams for row in rows):
        size, given = next(sizes), [0] * len(streams)
        left = [sum(counts[row] for row in rows) for rows in streams]
        while size and given != left:
            for number in range(len(streams)):
                if size and given[number] < left[number]:
                    given[number], size = given[number] + 1, size - 1
        taken = list[int]()
        for number, rows in enumerate(streams):
            while given[number] > 0:
                row = rows.pop(0)
                given[number] -= counts[row]
                taken += [row] * (counts[row] > 0)
        updates.append(taken)
    return updates


def train_whole(updates: Sequence[Sequence[int]], *, tokens: bool) -> list[float]:
    """The weight and bias after plain SGD on whole batches, of the model of `Training`."""
    model = model_of_zeros()
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    for rows in updates:
        inner.zero_grad()
        loss(model, torch.tensor(rows), tokens=tokens).backward()  # type: ignore[no-untyped-call]
        inner.step()
    return [parameter.item() for parameter in model.parameters()]


def model_of_zeros() -> nn.Linear:
    model = nn.Linear(1, 1).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def loss(model: nn.Module, rows: Tensor, *, tokens: bool) -> Tensor:
    """The mean over rows, or over what they count."""
    x = rows.double().view(-1, 1) / 1000
    each, weights = (
        (model(x) - x.cos()).square().view(-1),
        tokens_of(rows).double() if tokens else torch.ones(len(rows)),
    )
    return (each * weights).sum() / weights.sum()


class StreamTraining:
    """A training of streams on one rank."""

    def __init__(
        self, backend: vbs.backend.Backend, trace: Any, streams: Any, *, tokens: bool = False, **options: Any
    ) -> None:
        self.model, self.tokens, world = model_of_zeros(), tokens, backend.world
        options = {"minibatch_size": 3, "counts": tokens_of if tokens else None, **options}
        batches = streams if trace is None else None  # that arrive: one rank's part of each
        streams = None if trace is None else streams
        self.source = vbs.ArrivingBatches(
            trace=trace, streams=streams, num_replicas=world.size, rank=world.rank, **options
        )
        inner = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.optimizer = vbs.ConstantOptimizer(inner, self.source, backend=backend)
        self.updates: Any = vbs.updates(self.source if batches is None else batches, self.optimizer)

    def run(self, until: float = math.inf) -> list[list[int]]:
        """Train to the end of the pass, or to an update, and return the rows of this rank in each update."""
        found = []
        for update in self.updates:
            used = list[int]()
            for rows in update:
                if self.optimizer.microbatch.samples:
                    used += rows.flatten().tolist()
                self.optimizer.backward(loss(self.model, rows, tokens=self.tokens))
                self.optimizer.step()
            found.append(used)
            if self.optimizer.updates >= until:
                break
        return found

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "vbs": self.optimizer.state_dict(),
            "stream": self.updates.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["vbs"])
        self.updates.load_state_dict(state["stream"])


def in_order(ranks: Sequence[Sequence[Sequence[int]]], number: int) -> list[list[int]]:
    """The rows of each update of all ranks, in their order; `number`: of streams."""
    together = [[row for used in of_update for row in used] for of_update in zip(*ranks, strict=True)]
    if number < len(ranks):  # each rank has a part of the order
        return together
    for used in (used for rank in ranks for used in rank):
        assert used == sorted(used, key=lambda row: row // 1000)
    return [sorted(rows, key=lambda row: row // 1000) for rows in together]  # which is stable
