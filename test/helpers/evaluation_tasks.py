"""Tasks that train in a tenth of a second: named by "helpers.evaluation_tasks:..." in evaluations."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from variable_batch_size.lab.evaluation import Evaluation, Experiment

SIZE = 96  # samples


class Tiny:
    """A linear model with dropout, on random numbers; with a schedule and a clipped gradient."""

    ref_batchsize, lr, minibatch_size, samples, between = 8, 0.05, 4, 240, 64
    max_grad_norm = 5.0

    def __init__(self, shift: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(7)
        inputs = torch.randn(SIZE + 32, 6, generator=generator)
        noise = 0.3 * torch.randn(SIZE + 32, 1, generator=generator)
        self.inputs, self.outputs = inputs, inputs.sum(1, keepdim=True) + noise + shift

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def dataset(self) -> TensorDataset:
        return TensorDataset(self.inputs[:SIZE], self.outputs[:SIZE])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, outputs = batch
        loss: Tensor = (model(inputs) - outputs).square().mean()
        return loss

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        error = (model(self.inputs[SIZE:]) - self.outputs[SIZE:]).square()
        return {"loss": float(error.mean()), "accuracy": float((error < 0.25).float().mean())}

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def schedule(self, samples: int, total: int) -> float:
        return 1 - 0.9 * samples / total


class Sized(Tiny):
    """It has two arguments."""

    def __init__(self, shift: float, sizes: tuple[int, ...]) -> None:
        super().__init__(shift + sum(sizes))


class NoReference(Tiny):
    """Its batch size of reference is not known."""

    ref_batchsize: Any = None
    schedule: Any = None


class NoSchedule(Tiny):
    """Its learning rate stays."""

    schedule: Any = None


class ScheduledWithoutReference(Tiny):
    """It has a schedule, but its batch size of reference is not known."""

    ref_batchsize: Any = None


class Failing(Tiny):
    """Its evaluation raises."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        raise ZeroDivisionError("an error of the task")


class VectorLoss(Tiny):
    """Its loss is not a mean."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = (model(batch[0]) - batch[1]).square()
        return loss


class NotCreated(Tiny):
    """It cannot be created."""

    def __init__(self) -> None:
        raise KeyError("an error of the task")


class NoData(Tiny):
    """Its dataset raises."""

    def dataset(self) -> TensorDataset:
        raise RuntimeError("an error of the task")


class KilledAlways(Tiny):
    """Each process that trains it with one seed is killed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.deadly = self.seed = seed

    def model(self, seed: int) -> nn.Module:
        self.seed = seed
        return super().model(seed)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if self.seed == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate(model)


class KilledLater(Tiny):
    """The first process is killed at its 40th microbatch, after it has written its checkpoints; others continue.

    `folder` has a file for each process, with the microbatches that it has computed.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with (self.folder / str(os.getpid())).open("a") as file:
            file.write(".")
            if file.tell() == 40 and len(list(self.folder.iterdir())) == 1:
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


class Ordered(Tiny):
    """It writes the seed of its training to a file with each evaluation."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file, self.seed = Path(file), 0

    def model(self, seed: int) -> nn.Module:
        self.seed = seed
        return super().model(seed)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with self.file.open("a") as file:
            file.write(str(self.seed))
        return super().evaluate(model)


class Unpicklable(Tiny):
    """Its evaluation raises an error that cannot be sent to another process."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        error = ZeroDivisionError("an error of the task")
        error.add = lambda: None  # type: ignore[attr-defined]
        raise error


class NoLoss:
    """It lacks two of the five functions."""

    model, dataset, optimizer = Tiny.model, Tiny.dataset, Tiny.optimizer


class Empty(Tiny):
    """A training of one update of one weight, to measure what everything around it costs."""

    ref_batchsize, samples, between, max_grad_norm = 1, 1, 1, None
    schedule: Any = None

    def model(self, seed: int) -> nn.Module:
        return nn.Linear(6, 1)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": 1.0}


tiny = Tiny()


def experiment(task: str = "Tiny", **other: Any) -> Experiment:
    """Return the experiment with one of these tasks, one trace, one rule and one seed, or others."""
    tasks = {f"helpers.evaluation_tasks:{task}": other.pop("arguments", {})}
    return Experiment(**{"tasks": tasks, "traces": ["8"], "rules": ["linear"], "seeds": 1} | other)


def brought(evaluation: Evaluation) -> dict[str, Any]:
    """Return key -> status and curve of each training: what is the same wherever and however it was trained."""
    rows = evaluation.trainings
    return dict(zip(rows["key"], zip(rows["status"], rows["curve"], strict=True), strict=True))
