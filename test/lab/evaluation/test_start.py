"""Trainings go on from a checkpoint as the training that has saved it, until a seed changes the next epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.evaluation_tasks import SIZE, Tiny, brought
from variable_batch_size.adaptive import Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.evaluation import Cell, Experiment, ModelTime, UnderCapacity, run
from variable_batch_size.lab.evaluation.experiment import check
from variable_batch_size.lab.evaluation.records import REFERENCE
from variable_batch_size.lab.evaluation.training import train

pytestmark = pytest.mark.filterwarnings("ignore:trace .*the batch size is")
TINY = "helpers.evaluation_tasks:Tiny"
SAMPLES, SEED, LR = 480, 3, 0.05


def saved(folder: Path, updates: int = 14, by: Any = "samples", model: Any = None, **options: Any) -> list[float]:
    """Train the task as a user would, save after so many updates, and return the weights at the end of the epoch."""
    arguments: dict[str, Any] = {"rule": "linear", "ref_batchsize": 8} | options
    task, trace = Tiny(), "0:8 10:16"
    model = task.model(SEED) if model is None else model
    dataset = task.dataset()
    sampler = vbs.CustomSampler(dataset, trace, 1, 0, 4, SEED, fixed_shape=False, max_samples=SAMPLES)
    optimizer = vbs.CustomOptimizer(task.optimizer(model, LR), sampler, max_grad_norm=5.0, **arguments)
    schedule = LambdaLR(optimizer, lambda step: task.schedule(step * 8, SAMPLES))
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if by is not None:
        parts["scheduler"] = vbs.ProgressScheduler(schedule, optimizer, by=by)
    with vbs.Checkpoint(folder, **parts) as checkpoint:
        for epoch in vbs.remaining_epochs(sampler, optimizer):
            for batch in DataLoader(dataset, batch_size=None, sampler=sampler, collate_fn=tuple):
                task.loss(model, batch).backward()
                if optimizer.step() and by is not None:
                    parts["scheduler"].step()
                if optimizer.updates == updates and not optimizer.inside_step:
                    checkpoint.save()
            if epoch == 1:
                break
    return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()


def cells(folder: Path, **other: Any) -> list[Cell]:
    arguments: dict[str, Any] = {"tasks": [TINY], "traces": ["16"], "rules": ["linear"], "seeds": 2, "between": 16}
    return Experiment(**arguments | {"samples": SAMPLES, "start": folder} | other).cells()


def of(wanted: list[Cell], rule: str, seed: int = 0, trace: str = "16", factor: float = 1.0) -> Cell:
    kind = (rule, seed, trace, factor)
    return next(cell for cell in wanted if (cell.rule, cell.seed, cell.trace, cell.lr_factor) == kind)


def test_the_epoch_that_has_begun_is_that_of_the_training(tmp_path: Path) -> None:
    """Its order, dropout, momentum and schedule: to the last bit, with another object for each of them."""
    weights = saved(tmp_path)
    wanted = cells(tmp_path)
    model, tasks = torch.nn.Module(), []

    class Kept(Tiny):
        def model(self, seed: int) -> torch.nn.Module:
            nonlocal model
            model = super().model(seed)
            return model

        def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
            tasks.append(torch.cat([one.detach().flatten() for one in model.parameters()]).tolist())
            return super().evaluate(model)

    import sys
    from types import ModuleType

    module = ModuleType("kept_task")
    module.task = Kept()  # type: ignore[attr-defined]
    sys.modules["kept_task"] = module
    (cell, *_) = (one for one in cells(tmp_path, tasks=["kept_task:task"]) if one.rule == "linear")
    curve = train(cell)["curve"]
    assert curve["samples"][:4] == [144, 160, 176, 192]
    assert tasks[curve["samples"].index(2 * SIZE) + 1] == weights  # after that of the untrained model
    assert wanted
