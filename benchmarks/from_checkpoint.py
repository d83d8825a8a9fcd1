"""Does a tenth of the rest tell what the rest does? Trainings that go on from a checkpoint at 8 and 16 times the batch.

    PYTHONPATH=test python benchmarks/from_checkpoint.py [TASK ...]

Three tasks are trained at their reference batch size for an epoch, an eighth of the training, and saved. From there
six rules, and `constant` at twice the learning rate, train the rest with five seeds, as `vbs evaluate --from` does.
Spearman's rank correlation is that of the seven means of the validation loss after a tenth of the rest, and at its end.
Trainings from one checkpoint share its weights: the ratio of the standard deviation of paired differences to the
baseline to that of unpaired ones tells what pairs by seeds bring. About five minutes on one core.
"""

from __future__ import annotations

import math
import sys
import tempfile
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from records import Measured
from results import record
from variable_batch_size.lab.evaluation import Experiment, load_task, run
from variable_batch_size.lab.evaluation.records import REFERENCE
from variable_batch_size.lab.evaluation.tasks.char_gpt import warmup_cosine

EPOCH = 2**13  # samples
RATIOS, SEEDS = (8, 16), 5
RULES = {
    "sgd": ("constant", "linear", "linear-momentum", "root", "power:0.75", "adascale"),
    "adamw": ("constant", "linear", "root", "power:0.75", "adamscale", "root-half-life"),
}
TASKS: dict[str, dict[str, Any]] = {
    "teacher-sgd": {"optimizer": "sgd"},
    "noisy-teacher-sgd": {"optimizer": "sgd", "width": 256, "wrong": 0.3},
    "teacher-adamw": {"optimizer": "adamw"},
}


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
    between: ClassVar[int] = 2**10

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
        inputs = torch.randn(EPOCH + 4096, 32, generator=generator)
        first, second = (torch.randn(shape, generator=generator) for shape in ((32, 32), (32, 10)))
        labels = (torch.tanh(inputs @ first / 3) @ second).argmax(1)
        anew = torch.rand(len(labels), generator=generator) < self.wrong
        return inputs, torch.where(anew, torch.randint(10, labels.shape, generator=generator), labels)


def save(task: Any, folder: Path) -> None:
    """Train at the reference batch size for an epoch, and save."""
    model, dataset, size = task.model(0), task.dataset(), task.ref_batchsize
    sampler = vbs.CustomSampler(dataset, size, 1, 0, size, fixed_shape=False)
    optimizer = vbs.CustomOptimizer(
        task.optimizer(model, task.lr), sampler, size, max_grad_norm=task.max_grad_norm, noise="differenced"
    )
    schedule = LambdaLR(optimizer, lambda step: task.schedule(step * size, task.samples))
    scheduler = vbs.ProgressScheduler(schedule, optimizer, by="samples")
    with vbs.Checkpoint(folder, model=model, optimizer=optimizer, scheduler=scheduler) as checkpoint:
        for update in vbs.updates(DataLoader(dataset, batch_size=None, sampler=sampler, collate_fn=tuple), optimizer):
            for batch in update:
                optimizer.backward(task.loss(model, batch))
                optimizer.step()
            scheduler.step()
        checkpoint.save()


def losses_of(name: str, ratio: int, folder: Path) -> pd.DataFrame:
    """Return the losses after a tenth of the rest and at its end, of each candidate and seed."""
    arguments = TASKS[name]
    rules, task = RULES[arguments["optimizer"]], "from_checkpoint:Teacher"
    size = ratio * Teacher.ref_batchsize
    experiment = Experiment({task: arguments}, {str(size): size}, rules, seeds=SEEDS, lr_factors=[1, 2], start=folder)
    cells = [
        cell
        for cell in experiment.cells()
        if cell.trace != REFERENCE and (cell.lr_factor == 1 or cell.rule == "constant")
    ]
    tenth = EPOCH + (Teacher.samples - EPOCH) / 10
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for row in run(cells, place).trainings.itertuples():
            samples, loss = np.array(row.curve["samples"]), np.array(row.curve["loss"], float)
            ends = loss[np.argmax(samples >= tenth)], loss[-1]
            rows.append(
                (f"{row.rule} x {row.lr_factor:g}", row.seed, *(ends if row.status == "finished" else (9.0, 9.0)))
            )
    return pd.DataFrame(rows, columns=["candidate", "seed", "tenth", "end"])


def main() -> None:
    warnings.filterwarnings("ignore", "trace .*the batch size is")
    for name in sys.argv[1:] or TASKS:
        arguments = TASKS[name]
        with tempfile.TemporaryDirectory() as folder:
            save(load_task("from_checkpoint:Teacher", arguments), Path(folder))
            for ratio in RATIOS:
                losses = losses_of(name, ratio, Path(folder))
                means = losses.groupby("candidate")[["tenth", "end"]].mean().sort_values("end")
                print(means.to_string())
                table = losses.pivot(index="seed", columns="candidate", values="end")
                baseline, others = table["constant x 1"], table.drop(columns="constant x 1")
                apart = others.sub(baseline, axis=0).std() / np.sqrt(others.var() + baseline.var())
                own = {"on": name, "case": f"k = {ratio}", "where": "CPU"}
                rank = float(spearmanr(means["tenth"], means["end"]).statistic)
                record(
                    "rank correlation of a tenth of the rest with the rest", "six rules, constant x 2", rank, "", **own
                )
                pairs = Measured(float(apart.median()), float(apart.min()), float(apart.max()), n=SEEDS)
                record("standard deviation with pairs of seeds, to that without", "trainings --from", pairs, **own)


if __name__ == "__main__":
    main()
