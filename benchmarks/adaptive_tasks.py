"""Small trainings whose batch size a controller chooses: what they train, on what, and when they have learned it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import variable_batch_size as vbs
from variable_batch_size.lab.evaluation.tasks import char_gpt as gpt
from variable_batch_size.lab.evaluation.tasks.char_gpt import standard_library
from variable_batch_size.lab.evaluation.tasks.mnist_cnn import cnn

Images = tuple[Tensor, Tensor]  # float32 (n, 1, 28, 28), and labels, int64 (n,)


@dataclass(frozen=True)
class Task:
    """What is trained, and until when.

    Attributes:
        name: name of the task.
        small: the reference batch size, in samples; also the least one.
        large: the largest batch size.
        rule: of the learning rate.
        lr: learning rate at the reference.
        target: loss of the validation data that ends a training.
        samples: those after which a training ends without the target, and the length of the schedule.
        between: samples between two evaluations.
        dataset_size: samples to train on.
        scheduled: whether the learning rate follows `gpt.warmup_cosine`.
        microbatch: largest number of rows of a microbatch.
    """

    name: str
    small: int
    large: int
    rule: str
    lr: float
    target: float
    samples: int
    between: int
    dataset_size: int
    scheduled: bool = False
    microbatch: int = 16

    @property
    def schedule(self) -> Callable[[int], float]:
        """Updates at the reference -> factor on the learning rate."""
        return gpt.warmup_cosine(self.samples // self.small) if self.scheduled else lambda update: 1.0


TASKS = {
    task.name: task
    for task in (
        Task("MNIST", 32, 1024, "adascale", 2**-7, 0.12, 300_000, 2048, 60_000),
        Task("Fashion-MNIST", 32, 1024, "adascale", 2**-7, 0.48, 300_000, 2048, 60_000),
        Task("GPT", 16, 128, "root", 2**-9, 2.35, 8192, 512, 32_768, scheduled=True, microbatch=8),
    )
}


class Training:
    """The model, the data and the inner optimizer of a task; loss of samples, and loss of the validation data."""

    def __init__(self, task: Task, images: Callable[[str, bool], Images], seed: int) -> None:
        torch.manual_seed(seed)
        self.task, self.loss_of = task, gpt.loss_of if task.name == "GPT" else image_loss
        if task.name == "GPT":
            self.model: nn.Module = gpt.GPT(width=128, layers=5)
            self.data, self.validation = ((blocks,) for blocks in standard_library(task.dataset_size, 128))
            groups: Any = gpt.parameter_groups(self.model)
            self.inner: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=task.lr, betas=(0.9, 0.95))
        else:
            self.model, (self.data, self.validation) = cnn(), (images(task.name, train) for train in (True, False))
            self.inner = torch.optim.SGD(self.model.parameters(), lr=task.lr, momentum=0.9)

    def loss(self, indices: list[int]) -> Tensor:
        """Return the mean loss of some samples."""
        chosen = torch.tensor(indices)
        loss: Tensor = self.loss_of(self.model, *(part[chosen] for part in self.data))
        return loss

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean loss of the validation data."""
        rows = zip(*(part.split(250) for part in self.validation), strict=True)
        parts = [(float(self.loss_of(self.model, *row)), len(row[0])) for row in rows]
        return sum(loss * number for loss, number in parts) / sum(number for _, number in parts)

    def optimizer(self, sampler: vbs.CustomSampler, **options: Any) -> tuple[vbs.CustomOptimizer, Any]:
        """Return the optimizer, which measures the noise, and the schedule of the learning rate."""
        norm = 1.0 if self.task.scheduled else None
        optimizer = vbs.CustomOptimizer(
            self.inner,
            sampler,
            self.task.small,
            rule=self.task.rule,
            noise="microbatches",
            max_grad_norm=norm,
            **options,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(self.inner, self.task.schedule)
        return optimizer, vbs.ProgressScheduler(schedule, optimizer, by="samples")


def image_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of images."""
    return F.cross_entropy(model(images), labels)
