"""A loss whose terms have denominators of their own, and the ordinary loop over whole batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import variable_batch_size as vbs
from helpers.reference import Array, Training, batches, data, network

DATASET = 50
Numbers = Mapping[str, Tensor]  # what each sample counts, by term, (samples,)


def terms(output: Tensor, target: Tensor, numbers: Numbers) -> dict[str, Tensor]:
    """The sum of each term, over the rows of a microbatch."""
    of_sample = {
        "tokens": (output - target).square().sum(dim=1),
        "marked": output.exp().sum(dim=1) / 4,
        "rows": output.square().sum(dim=1),
    }
    return {name: (of_sample[name] * number).sum() for name, number in numbers.items()}


@dataclass
class Divided:
    """A training whose terms are divided by their counts."""

    run: Training
    numbers: Numbers

    def counts(self, indices: list[int]) -> dict[str, Any]:
        return {name: number[indices].sum() for name, number in self.numbers.items()}

    def loss(self, indices: list[int], totals: Mapping[str, Any]) -> Tensor:
        own = {name: number[indices].to(self.run.x) for name, number in self.numbers.items()}
        sums = terms(self.run.model(self.run.x[indices]), self.run.target[indices], own)
        return torch.stack([total / totals[name] for name, total in sums.items()]).sum()

    def step(self, indices: list[int], totals: Mapping[str, Any]) -> bool:
        self.run.optimizer.backward(self.loss(indices, totals), divided=True)
        return self.run.optimizer.step()

    def updates(self) -> Any:
        sampler: Any = self.run.sampler
        return vbs.updates(sampler, self.run.optimizer, counts=self.counts)

    def train(self, updates: int, step: Callable[[list[int], Mapping[str, Any]], bool] | None = None) -> list[bool]:
        """Train until this update; return what the last `step()` of each has returned."""
        made: list[bool] = []
        while self.run.optimizer.updates < updates:
            for update in self.updates():
                made.append([(step or self.step)(indices, update.counts) for indices in update][-1])
                if self.run.optimizer.updates == updates:
                    break
        return made


def plain(numbers: Numbers, batches: Sequence[list[int]]) -> list[Array]:
    """The weights of an ordinary loop over whole batches, which leaves out the terms of which there is nothing."""
    model, (x, target) = network(), data(DATASET)
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5, weight_decay=0.01)
    for indices in batches:
        own = {name: number[indices] for name, number in numbers.items()}
        sums = terms(model(x[indices]), target[indices], own)
        means = [total / own[name].sum() for name, total in sums.items() if own[name].sum() > 0]
        if not means:
            continue
        inner.zero_grad()
        torch.stack(means).sum().backward()
        inner.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def batches_of(sizes: Sequence[int]) -> list[list[int]]:
    """The samples of each update."""
    return [samples.tolist() for samples in batches(sizes, DATASET)]
