"""Tasks of which a training may go on from a checkpoint: teachers whose samples are drawn from a formula."""

from __future__ import annotations

import math
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

from variable_batch_size.lab.evaluation.tasks.char_gpt import warmup_cosine


class Teacher:
    """Ten classes that a random network gives to random inputs, of which a share is then drawn anew.

    Args:
        optimizer: "sgd", with momentum 0.9 and a cosine schedule; or "adamw", with a warm-up and clipped gradients.
        width: hidden units of the model.
        wrong: share of the labels that are drawn anew.
    """

    ref_batchsize: ClassVar[int] = 32
    minibatch_size: ClassVar[int] = 32
    samples: ClassVar[int] = 2**16
    between: ClassVar[int] = 2**14

    def __init__(self, optimizer: str = "sgd", width: int = 64, wrong: float = 0.1) -> None:
        self._adam, self.width, self.wrong = optimizer == "adamw", width, wrong
        self.lr = 2**-8 if self._adam else 2**-4
        self.max_grad_norm = 1.0 if self._adam else None

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(32, self.width), nn.ReLU(), nn.Linear(self.width, 10))

    def dataset(self) -> TensorDataset:
        return TensorDataset(*(part[:-4096] for part in self._all))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        inputs, labels = (part[-4096:] for part in self._all)
        return {"loss": float(F.cross_entropy(model(inputs), labels))}

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        return AdamW(model.parameters(), lr=lr) if self._adam else SGD(model.parameters(), lr=lr, momentum=0.9)

    def schedule(self, samples: int, total: int) -> float:
        if self._adam:
            return warmup_cosine(total // self.ref_batchsize)(samples // self.ref_batchsize)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, samples / total)))

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(2**16 + 4096, 32, generator=generator)
        first, second = (torch.randn(shape, generator=generator) for shape in ((32, 32), (32, 10)))
        labels = (torch.tanh(inputs @ first / 3) @ second).argmax(1)
        anew = torch.rand(len(labels), generator=generator) < self.wrong
        return inputs, torch.where(anew, torch.randint(10, labels.shape, generator=generator), labels)
