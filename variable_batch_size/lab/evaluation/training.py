"""From a cell to its record: a training that can be killed at any time."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from variable_batch_size import CustomOptimizer, CustomSampler, ProgressScheduler
from variable_batch_size._validation import value_error
from variable_batch_size.backend import LocalBackend
from variable_batch_size.lab.evaluation.cell import Cell, rule_of
from variable_batch_size.lab.evaluation.curve import Curve
from variable_batch_size.lab.evaluation.end import reached
from variable_batch_size.lab.evaluation.loop import Parts, evaluate, limited_threads, updates_of
from variable_batch_size.lab.evaluation.provenance import data_hash, environment, source_hash
from variable_batch_size.lab.evaluation.record import MARGIN, Record
from variable_batch_size.lab.evaluation.saving import Saving
from variable_batch_size.lab.evaluation.task import Defaults, Task, dataset_of, load_task

SAVE_EVERY = timedelta(seconds=30)
DATASET_SIZE = "samples in the dataset"
DATA = "hash of the dataset"
SOURCE = "source of the task"


def parts_of(cell: Cell, curve: Curve | None = None) -> Parts:
    """Create the objects of a training.

    Args:
        cell: what is trained.
        curve: of the training, of which the schedule reads the time; None: nothing is trained.

    Raises:
        TypeError, ValueError: if task, trace, rule and optimizer do not fit one another.
    """
    task = load_task(cell.task, cell.task_arguments, cell.data_dir)
    dataset: Any = dataset_of(task)
    most, size = cell.most_samples, cell.minibatch_size
    sampler = CustomSampler(dataset, cell.course.trace, 1, 0, size, cell.seed, fixed_shape=False, max_samples=most)
    model = task.model(cell.seed)
    optimizer = CustomOptimizer(
        task.optimizer(model, cell.lr),
        sampler,
        cell.ref_batchsize,
        rule=rule_of(cell.rule),
        max_grad_norm=cell.max_grad_norm,
        backend=LocalBackend(),
    )
    return Parts(task, model, sampler, optimizer, _scheduler(cell, Defaults.of(task, cell.task), optimizer, curve))


def _scheduler(
    cell: Cell, defaults: Defaults, optimizer: CustomOptimizer, curve: Curve | None
) -> ProgressScheduler | LRScheduler | None:
    """Return the schedule of the task, which every rule reads by samples, or by its share of another end."""
    function, size, end = defaults.schedule, cell.ref_batchsize, cell.course.exact_end
    if function is None:
        return None
    if end.by != "samples":

        def factor(step: int) -> float:
            share = end.share(curve, optimizer.progress) if curve is not None and step else 0.0
            return function(round(min(share, 1.0) * cell.samples), cell.samples)

        return LambdaLR(optimizer, factor)
    if size is None:
        raise ValueError(f"the schedule of the task {cell.task} needs a ref_batchsize, but there is none; pass one")
    return ProgressScheduler(
        LambdaLR(optimizer, lambda step: function(step * size, cell.samples)), optimizer, by="samples"
    )


def train(cell: Cell, folder: Path, threads: int = 1, save_every: timedelta | int = SAVE_EVERY) -> Path:
    """Train a cell, or continue where a killed training has saved, and write its record.

    Args:
        cell: what is trained.
        folder: folder of the records; checkpoints are in its subfolder `checkpoints` until the record is written.
        threads: number of threads of torch.
        save_every: interval of the checkpoints: time, or a number of updates.

    Returns:
        The path of the record.
    """
    return publish(record_of(cell, checkpoints_of(folder, cell.key), threads, save_every), folder)


def record_of(
    cell: Cell, checkpoints: Path | None, threads: int = 1, save_every: timedelta | int = SAVE_EVERY
) -> Record:
    """Train a cell, or continue where a killed training has saved, and return its record.

    The random numbers of torch, NumPy and `random` are seeded. With one thread a training is a function of the cell; it
    may be a little different on another machine or with another version of torch.

    Args:
        cell: what is trained.
        checkpoints: folder of its checkpoints, which remain; None: it saves none.
        threads: number of threads of torch.
        save_every: interval of the checkpoints: time, or a number of updates.
    """
    with limited_threads(threads):
        torch.manual_seed(cell.seed)
        np.random.seed(cell.seed % 2**32)
        random.seed(cell.seed)
        curve = Curve(cell.course.time, cell.minibatch_size)
        parts = parts_of(cell, curve)
        own = {"model": parts.model, "optimizer": parts.optimizer, "scheduler": parts.scheduler, "curve": curve}
        own_facts = _facts(parts, cell) | {"threads": threads}
        with Saving(checkpoints, save_every, own) as saving:
            saving.restore()
            _train(parts, cell, curve, saving)
        return Record(
            key=cell.key,
            cell=cell.as_json(),
            status="diverged" if curve.diverged else "finished",
            curve=curve.columns(),
            wall_seconds=round(curve.wall_seconds, 3),
            environment=environment() | own_facts,
        )


def _facts(parts: Parts, cell: Cell) -> dict[str, Any]:
    """Return what else determines a training, and what its record is judged by."""
    inner = parts.optimizer.inner
    options = {name: value for name, value in inner.defaults.items() if value is not None and name != "lr"}
    return {
        "optimizer": f"{type(inner).__name__}({', '.join(f'{name}={value}' for name, value in options.items())})",
        "seed of the model": cell.seed,
        "seed of the order": cell.seed,
        DATASET_SIZE: parts.sampler.plan.dataset_size,
        DATA: data_hash(parts.task),
        SOURCE: source_hash(parts.task),
        MARGIN: Defaults.of(parts.task, cell.task).margin,
    }


def checkpoints_of(folder: Path, key: str) -> Path:
    """Return the folder of the checkpoints of a training."""
    return folder / "checkpoints" / key


def publish(record: Record, folder: Path) -> Path:
    """Write a record, after which the checkpoints of its training are not needed."""
    path = record.write(folder)
    shutil.rmtree(checkpoints_of(folder, record.key), ignore_errors=True)
    return path


def _train(parts: Parts, cell: Cell, curve: Curve, saving: Saving) -> None:
    """Train until the end of the cell, or the training diverges."""
    optimizer, scheduler, end = parts.optimizer, parts.scheduler, cell.course.exact_end
    watch = _stopwatch(curve)

    def at_the_end() -> bool:
        return end.by != "samples" and reached(end.share(curve, optimizer.progress))

    if not curve.rows:
        evaluate(parts, curve)
        _check_target(parts.task, cell.task, curve)
    for updated in () if at_the_end() else updates_of(parts, curve):
        curve.update(optimizer.updates, optimizer.current_lr())
        if updated and scheduler is not None:
            scheduler.step()
        if optimizer.samples // cell.between > curve.samples // cell.between:
            evaluate(parts, curve)
        watch()
        saving.step(optimizer.updates)
        if curve.diverged or at_the_end():
            break
    if curve.samples < optimizer.samples and not curve.diverged:
        evaluate(parts, curve)
    watch()


def _check_target(task: Task, name: str, curve: Curve) -> None:
    """Raise an error before anything is trained if the task does not evaluate the metric of its target."""
    target = Defaults.of(task, name).target
    if target is not None and curve.rows and target[0] not in curve.rows[0]:
        requirement = f"the target of the task {name} must be a metric that its evaluate() returns"
        raise value_error(requirement, repr(target[0]), "correct one of them")


def _stopwatch(curve: Curve) -> Callable[[], None]:
    """Return a function that adds the seconds since its last call to those of the curve."""
    last = time.perf_counter()

    def add() -> None:
        nonlocal last
        now = time.perf_counter()
        curve.wall_seconds += now - last
        last = now

    return add
