"""The user's model and data of a case, which the package and the twin both train."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

FEATURES, HIDDEN, OUTPUTS = 3, 4, 2


class Net(nn.Module):
    """f(x) = W tanh(V x + a) + b, with the parts that a case asks for.

    Attributes:
        update: number of updates before the present one; a part may be used in some updates only.
        generator: source of the dropout masks; None for torch's global generator.
    """

    def __init__(self, parts: frozenset[str], generator: torch.Generator) -> None:
        super().__init__()
        self.parts = parts
        self.update = 0
        self.generator: torch.Generator | None = None
        self.first, self.last = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)
        for part in sorted({"unused", "rare", "alternate"} & parts):
            self.add_module(part, nn.Linear(FEATURES, OUTPUTS))
        if "batchnorm" in parts:
            self.norm = nn.BatchNorm1d(HIDDEN, eps=0.1)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
        if "frozen" in parts:
            self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if "batchnorm" in self.parts:  # torch raises for a single row
            hidden = self.norm(hidden) if len(x) > 1 else hidden * self.norm.weight + self.norm.bias
        hidden = torch.tanh(hidden)
        if "dropout" in self.parts and self.training:
            hidden = hidden * (torch.rand(hidden.shape, generator=self.generator) < 0.7).to(hidden.dtype)
        output: Tensor = self.last(hidden)
        if "tied" in self.parts:  # the first layer's weights are used a second time
            output = output + (hidden @ self.first.weight)[:, :OUTPUTS]
        if "alternate" in self.parts and self.update % 3 != 1:
            output = output + self.get_submodule("alternate")(x)
        if "rare" in self.parts:
            chosen = (x[:, 0] > 0.9).nonzero()[:, 0]
            if len(chosen):
                output = output.index_add(0, chosen, self.get_submodule("rare")(x[chosen]))
        return output


class Data:
    """Inputs (samples, features) and targets (samples, outputs) in a dtype; a poisoned sample has an infinite loss."""

    def __init__(self, seed: int, samples: int, poisoned: int | None, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        self.target = torch.randn(samples, OUTPUTS, generator=generator, dtype=torch.float64).to(dtype)
        if poisoned is not None:
            self.target[poisoned] = torch.inf

    def loss(self, model: Net, rows: Sequence[int] | Tensor, reduction: str, *, of_tokens: bool = False) -> Tensor:
        errors: Tensor = (model(self.x[rows]) - self.target[rows]).square().sum(dim=1)
        if of_tokens:
            errors = errors * torch.tensor([tokens(row) for row in rows], dtype=errors.dtype)
        return errors.mean() if reduction == "mean" else errors.sum()


def tokens(sample: int) -> int:
    """The number of tokens of a sample, 0 for some."""
    return sample * sample % 5


def seed_masks(model: Net, seed: int, update: int, first_row: int | None) -> None:
    """Let the dropout masks of a microbatch be a function of the update and its first sample.

    With `first_row=None` they come from torch's global generator, which is seeded here once an update.
    """
    if first_row is None:
        torch.manual_seed(seed % 2**31 + update)
    else:
        model.generator = torch.Generator().manual_seed((seed % 2**31) * 1009 + update * 101 + first_row)
