"""A training of a cell, which can be killed at any time: its objects, its loop, and the line that it brings."""

from __future__ import annotations

import logging
import math
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset, TensorDataset

from variable_batch_size import CustomOptimizer, CustomSampler, ProgressScheduler, remaining_epochs
from variable_batch_size._validation import value_error
from variable_batch_size.backend import LocalBackend
from variable_batch_size.checkpoint import Checkpoint
from variable_batch_size.lab.evaluation.cell import Cell
from variable_batch_size.lab.evaluation.curve import Curve, check_metrics
from variable_batch_size.lab.evaluation.provenance import environment
from variable_batch_size.lab.evaluation.start import Start
from variable_batch_size.lab.evaluation.task import Defaults, Task, dataset_of, load_task

SAVE_EVERY = timedelta(seconds=30)  # between two checkpoints of a training


class TrainingParts(NamedTuple):
    """The objects that a training run needs: task, model, sampler, optimizer and schedule.

    Attributes:
        schedule: the schedule of the learning rate; None without one.
        scheduler: the object whose `step()` is called after each update; `schedule` itself if it goes by another end
            than samples.
    """

    task: Task
    model: nn.Module
    sampler: CustomSampler
    optimizer: CustomOptimizer
    schedule: LambdaLR | None
    scheduler: ProgressScheduler | LambdaLR | None


def create_parts(cell: Cell, curve: Curve) -> TrainingParts:
    """Create the model, sampler, optimizer and schedule of a training run, in the state from which it starts.

    Args:
        cell: the settings of the run.
        curve: its curve, from which a schedule by seconds or cost reads them.
    """
    task = load_task(cell.task, cell.task_arguments, cell.data_dir)
    dataset: Any = dataset_of(task)
    order = {"seed": cell.seed} if cell.start is None else cell.start.order
    sampler = CustomSampler(
        dataset,
        cell.timed.trace,
        1,
        0,
        cell.minibatch_size,
        fixed_shape=False,
        max_samples=cell.timed.end.max_samples(cell.samples),
        **order,
    )
    model = task.model(cell.seed)
    optimizer = CustomOptimizer(
        task.optimizer(model, cell.lr),
        sampler,
        cell.ref_batchsize,
        rule=cell.rule,
        max_grad_norm=cell.max_grad_norm,
        backend=LocalBackend(),
    )
    parts = TrainingParts(task, model, sampler, optimizer, *_create_schedules(cell, task, optimizer, curve))
    if cell.start is not None:
        curve.untrained = check_metrics(metrics_of(parts))["loss"]
        _restore_start(parts, cell.start, cell.lr_factor)
    return parts


def _create_schedules(
    cell: Cell, task: Task, optimizer: CustomOptimizer, curve: Curve
) -> tuple[LambdaLR | None, ProgressScheduler | LambdaLR | None]:
    """Create the learning-rate schedule of a run: return the `schedule` and `scheduler` of `TrainingParts`.

    Both are None if the run has neither a schedule nor a warm-up. A training that ends with samples follows the
    schedule by its samples. One with another end, such as seconds, follows it by the share of this end that it has
    reached.
    """
    task_schedule, ref_batchsize, end = Defaults.read(task, cell.task).schedule, cell.ref_batchsize, cell.timed.end
    if task_schedule is None and not cell.warmup:
        return None, None

    def lr_factor(samples: int, total: int) -> float:
        """Return the factor on the learning rate after `samples` of `total` samples: schedule times warm-up."""
        after_update = samples + (ref_batchsize or 0)  # the warm-up does not begin at 0
        warmup = min(1.0, after_update / cell.warmup) if cell.warmup else 1.0
        return warmup * (1.0 if task_schedule is None else task_schedule(samples, total))

    if end.by != "samples":

        def lr_factor_by_share(step: int) -> float:
            share = end.share(curve, optimizer.progress) if step else 0.0
            return lr_factor(round(min(share, 1.0) * cell.samples), cell.samples)

        schedule = LambdaLR(optimizer, lr_factor_by_share)
        return schedule, schedule
    if ref_batchsize is None:
        raise ValueError(f"the schedule of the task {cell.task} needs a ref_batchsize, but there is none; pass one")
    schedule = LambdaLR(optimizer, lambda step: lr_factor(step * ref_batchsize, cell.samples))
    return schedule, ProgressScheduler(schedule, optimizer, by="samples")


class _Unused:
    """A placeholder for a part of a checkpoint that a run which starts from it does not use. It ignores its state."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Ignore the state."""


def _restore_start(parts: TrainingParts, start: Start, lr_factor: float) -> None:
    """Load the checkpoint from which a run starts into its objects, and multiply the learning rates by a factor.

    It loads a copy, because a `Checkpoint` locks its folder and writes into it.
    """
    other_parts: dict[str, Any] = {name: _Unused() for name in start.others}
    if parts.scheduler is not None:
        other_parts["scheduler"] = parts.scheduler
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of another rule than in the checkpoint: rules are compared here
        try:
            shutil.copytree(start.path, Path(folder) / start.path.name)
        except FileNotFoundError:
            message = f"the checkpoint {start.path} must stay until all runs have ended, but it is gone"
            raise FileNotFoundError(f"{message}; pass a copy of it") from None
        saved = {"model": parts.model, "optimizer": parts.optimizer, **other_parts}
        with _without_info_logs(), Checkpoint(folder, **saved) as checkpoint:
            checkpoint.restore(strict=False, required=True)
    if parts.schedule is not None:
        _check_schedule(parts.schedule, float(parts.optimizer.param_groups[0]["lr"]), start)
    _scale_lr(parts, lr_factor)


def _check_schedule(schedule: LambdaLR, lr: float, start: Start) -> None:
    """Raise ValueError if the learning rate of a checkpoint, `lr`, is not the one of the task's schedule there."""
    expected = float(schedule.base_lrs[0] * schedule.lr_lambdas[0](schedule.last_epoch))
    if not math.isclose(lr, expected, rel_tol=1e-6):
        requirement = f"the schedule of the task must be that of the checkpoint {start.path}"
        found = f"lr {lr:g} in it, and {expected:g} by the task"
        raise value_error(requirement, found, "pass the samples of that training (--samples)")


def _scale_lr(parts: TrainingParts, lr_factor: float) -> None:
    """Multiply the learning rates of the schedule and of the parameter groups by a factor."""
    if parts.schedule is not None:
        parts.schedule.base_lrs = [rate * lr_factor for rate in parts.schedule.base_lrs]
    for group in parts.optimizer.param_groups:
        for name in {"lr", "initial_lr"} & set(group):
            value = group[name]
            group[name] = value.mul_(lr_factor) if isinstance(value, Tensor) else value * lr_factor


def train(
    cell: Cell,
    checkpoints: Path | None = None,
    threads: int = 1,
    save_every: timedelta | int = SAVE_EVERY,
    driver: int | None = None,
) -> dict[str, Any]:
    """Make a training run, or continue one from its last checkpoint, and return its results: a line of JSON.

    With one thread a training is a function of the cell; it may be a little different on another machine or with
    another version of torch.

    Args:
        cell: what is trained.
        checkpoints: folder of its checkpoints, which remain; None: it saves none.
        threads: number of threads of torch.
        save_every: interval of the checkpoints: time, or a number of updates.
        driver: number of the process that waits for the line, with whose end the training ends, too.

    Raises:
        RuntimeError: if the training fails; the message names the cell.
    """
    try:
        with _limited_threads(threads):
            return _train(cell, checkpoints, save_every, driver)
    except Exception as error:
        raise RuntimeError(f"the training {cell.key} ({cell}) failed: {type(error).__name__}: {error}") from error


def _train(cell: Cell, checkpoints: Path | None, save_every: timedelta | int, driver: int | None) -> dict[str, Any]:
    """Make a training run, and return its results, see `train`."""
    start_time = time.perf_counter()
    seed_all(cell.seed)
    curve = Curve(cell.timed.time, cell.minibatch_size, 0 if cell.start is None else cell.start.updates)
    parts = create_parts(cell, curve)
    optimizer = parts.optimizer
    saved: dict[str, Any] = {"model": parts.model, "optimizer": optimizer, "scheduler": parts.scheduler, "curve": curve}
    checkpoint: Checkpoint | None = None
    with ExitStack() as stack:
        if checkpoints is not None and any(checkpoints.glob("update-*")):
            checkpoint = stack.enter_context(Checkpoint(checkpoints, keep=1, every=save_every, **saved))
            checkpoint.restore()
        wall_seconds_before = curve.wall_seconds  # of earlier processes
        if not curve.rows:
            evaluate(parts, curve)  # before the first update
        # A run that was restored may already be over.
        for updated in () if _is_over(cell, parts, curve) else train_updates(parts, curve, cell):
            curve.add_update(optimizer.updates, optimizer.current_lr())
            if updated and parts.scheduler is not None:
                parts.scheduler.step()
            if optimizer.samples // cell.between > curve.samples // cell.between:  # a multiple of `between` was passed
                evaluate(parts, curve)
            curve.wall_seconds = wall_seconds_before + time.perf_counter() - start_time
            if checkpoint is not None:
                checkpoint.step()
            elif checkpoints is not None and _is_due(save_every, optimizer.updates, time.perf_counter() - start_time):
                checkpoint = stack.enter_context(Checkpoint(checkpoints, keep=1, every=save_every, **saved))
                checkpoint.save(wait=False)  # the first one, created late: short trainings need no folder
            if driver is not None and os.getppid() != driver:
                raise SystemExit("the evaluation has ended before its training")
            if _is_over(cell, parts, curve):
                break
        if curve.samples < optimizer.samples and not curve.diverged:
            evaluate(parts, curve)
    return _line(cell, parts, curve, wall_seconds_before + time.perf_counter() - start_time)


def _is_over(cell: Cell, parts: TrainingParts, curve: Curve) -> bool:
    """Return whether a training has diverged, or has reached its end if this is not a number of samples."""
    return curve.diverged or cell.timed.end.is_reached(curve, parts.optimizer.progress)


def _line(cell: Cell, parts: TrainingParts, curve: Curve, wall_seconds: float) -> dict[str, Any]:
    """Return the results of a run that has ended, as values of JSON: a line of the evaluation's file.

    Args:
        cell: the settings of the run.
        parts: its objects.
        curve: what it has measured.
        wall_seconds: how long it took, in all processes that have trained it.
    """
    return {
        "key": cell.key,
        "cell": cell.as_json(),
        "status": "diverged" if curve.diverged else "finished",
        "untrained": curve.untrained,
        "wall_seconds": round(wall_seconds, 3),
        "environment": environment() | _training_facts(parts, cell),
        "curve": curve.columns(),
    }


def _is_due(every: timedelta | int, updates: int, seconds: float) -> bool:
    """Return whether the first checkpoint of a run is due.

    Args:
        every: the interval: time, or a number of updates.
        updates: number of updates so far.
        seconds: seconds since the run began in this process.
    """
    return seconds >= every.total_seconds() if isinstance(every, timedelta) else updates % every == 0


def _training_facts(parts: TrainingParts, cell: Cell) -> dict[str, Any]:
    """Return facts about a run that a report shows: number of threads, optimizer, and start of the noise averages."""
    inner = parts.optimizer.inner
    options = {name: value for name, value in inner.defaults.items() if value is not None and name != "lr"}
    facts: dict[str, Any] = {"threads": torch.get_num_threads()}
    facts["optimizer"] = f"{type(inner).__name__}({', '.join(f'{name}={value}' for name, value in options.items())})"
    if cell.start is not None:
        facts["noise averages"] = "those of the checkpoint" if cell.start.has_noise else "empty at the beginning"
    return facts


def seed_all(*seeds: int) -> None:
    """Seed the random numbers of torch, NumPy and `random`. Several seeds are combined into one."""
    seed = seeds[0] if len(seeds) == 1 else int(np.random.SeedSequence(seeds).generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def train_updates(parts: TrainingParts, curve: Curve, cell: Cell) -> Iterator[bool]:
    """Train the model, and yield after each update whether it has changed the weights.

    It yields False for an update that was skipped, and ends when all samples are used or the training has diverged.
    """
    parts.model.train()
    for epoch in remaining_epochs(parts.sampler, parts.optimizer):
        for batch in _epoch_loader(parts, cell, epoch):
            updates_before, samples = parts.optimizer.updates, parts.optimizer.microbatch.samples
            try:
                loss = parts.task.loss(parts.model, batch)
            except Exception as error:
                if not _failed_by_divergence(parts.model, curve, error):
                    raise
                curve.diverged = True
                return
            if not curve.add_microbatch(_loss_value(loss), samples):
                return
            loss.backward()  # type: ignore[no-untyped-call]
            updated = parts.optimizer.step()
            if parts.optimizer.updates > updates_before:  # not only accumulated
                yield updated


def _epoch_loader(parts: TrainingParts, cell: Cell, epoch: int) -> DataLoader[Any]:
    """Return a `DataLoader` of the microbatches of an epoch.

    After a checkpoint the sampler has the seed of that training, so that the epoch which has begun keeps its order;
    later ones are shuffled once more, by the seed of the cell. Of a `TensorDataset` the rows of a batch are taken at
    once, which gives the same batches, and is faster.
    """
    dataset: Any = dataset_of(parts.task)
    options: dict[str, Any] = {"batch_sampler": parts.sampler}
    if type(dataset) is TensorDataset:
        options = {"batch_size": None, "sampler": parts.sampler, "collate_fn": tuple}
    if cell.start is not None and epoch > cell.start.epoch:
        seed_all(cell.seed, epoch)
        dataset = Subset(dataset, np.random.permutation(len(dataset)).tolist())
    return DataLoader(dataset, **options)


def evaluate(parts: TrainingParts, curve: Curve) -> None:
    """Evaluate the model, and add a row to the curve.

    If the evaluation raises because the model has diverged, its loss counts as nan, and the run ends as diverged.
    """
    metrics: Mapping[str, float] = {"loss": math.nan}
    try:
        metrics = metrics_of(parts)
    except Exception as error:
        if not _failed_by_divergence(parts.model, curve, error):
            raise
    optimizer = parts.optimizer
    curve.add_evaluation(optimizer.updates, optimizer.samples, optimizer.progress, metrics)


@torch.no_grad()
def metrics_of(parts: TrainingParts) -> Mapping[str, float]:
    """Evaluate the model, and return the metrics. Afterwards it is in `train()` mode, without gradients."""
    parts.model.eval()
    metrics = parts.task.evaluate(parts.model)
    parts.model.train()
    for parameter in parts.model.parameters():
        parameter.grad = None  # as between two updates
    return metrics


def _loss_value(loss: Any) -> float:
    """Return the value of a task's loss. Raise ValueError if it is not a tensor of one element."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(loss.detach())
    found = f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
    requirement = "loss() must return the mean loss of a batch, a tensor of one element"
    raise value_error(requirement, found, "return loss.mean()")


def _failed_by_divergence(model: nn.Module, curve: Curve, error: Exception) -> bool:
    """Return whether a task raised an error only because the training has diverged.

    This is the case if a number overflows, the last training loss is too high or a weight is not finite.
    """
    if curve.last is None:  # nothing has been trained yet
        return False
    overflows = isinstance(error, (OverflowError, FloatingPointError)) or not curve.last <= curve.limit
    return overflows or not all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@contextmanager
def _without_info_logs() -> Iterator[None]:
    """Disable log messages below WARNING within a block."""
    level_before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(level_before)


@contextmanager
def _limited_threads(number: int) -> Iterator[None]:
    """Limit torch to a number of threads within a block."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
