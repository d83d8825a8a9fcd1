"""The loop of a training of a task, in an evaluation: updates, evaluations, and when it has diverged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from variable_batch_size import CustomOptimizer, CustomSampler, ProgressScheduler, remaining_epochs
from variable_batch_size._validation import type_error, value_error
from variable_batch_size.lab.evaluation.curve import Curve
from variable_batch_size.lab.evaluation.task import Task, dataset_of


class Parts(NamedTuple):
    """The objects of a training."""

    task: Task
    model: nn.Module
    sampler: CustomSampler
    optimizer: CustomOptimizer
    scheduler: ProgressScheduler | LRScheduler | None


def updates_of(parts: Parts, curve: Curve) -> Iterator[bool]:
    """Train, and yield after each update whether it has changed the weights.

    It ends with the samples, or when the training has diverged, as `curve` then says. Who iterates over it steps the
    scheduler and calls `curve.update`.

    Args:
        parts: the objects of the training.
        curve: what the training has measured; it gets the losses of the microbatches.
    """
    task, model, sampler, optimizer, _ = parts
    model.train()
    loader = _loader_of(task, sampler)
    for _ in remaining_epochs(sampler, optimizer):
        for batch in loader:
            updates, samples = optimizer.updates, optimizer.microbatch.samples
            try:
                loss = task.loss(model, batch)
            except Exception as error:
                if not _failed_by_divergence(model, curve, error):
                    raise
                curve.diverged = True
                return
            if not curve.microbatch(_scalar(loss), samples):
                return
            loss.backward()  # type: ignore[no-untyped-call]
            updated = optimizer.step()
            if optimizer.updates > updates:
                yield updated


def evaluate(parts: Parts, curve: Curve) -> None:
    """Evaluate the model, and add a row to the curve; an error of a model that has diverged only says so."""
    metrics: Mapping[str, float] = {"loss": math.nan}
    try:
        metrics = metrics_of(parts.task, parts.model)
    except Exception as error:
        if not _failed_by_divergence(parts.model, curve, error):
            raise
    optimizer = parts.optimizer
    curve.evaluation(optimizer.updates, optimizer.samples, optimizer.progress, metrics)


@torch.no_grad()
def metrics_of(task: Task, model: nn.Module) -> Mapping[str, float]:
    """Return what the task's evaluation says of a model, which trains on afterwards, without gradients of it."""
    model.eval()
    metrics = task.evaluate(model)
    model.train()
    for parameter in model.parameters():
        parameter.grad = None  # as between two updates
    return metrics


def _scalar(loss: object) -> float:
    """Return the value of a loss, or raise an error if it cannot be one."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(loss.detach())
    requirement, remedy = "loss() must return the mean loss of a batch, a tensor of one element", "return loss.mean()"
    if isinstance(loss, Tensor):
        raise value_error(requirement, f"one of shape {tuple(loss.shape)}", remedy)
    raise type_error(requirement, loss, remedy)


def _failed_by_divergence(model: nn.Module, curve: Curve, error: Exception) -> bool:
    """Return whether an error of a task only says that the training has diverged.

    After the first update, if numbers overflow, as those of a perplexity, or the last loss is large, or the weights are
    not finite.
    """
    if not curve.began:
        return False
    if isinstance(error, (OverflowError, FloatingPointError)) or curve.large:
        return True
    return not all(bool(one.isfinite().all()) for one in model.parameters())


def _loader_of(task: Task, sampler: CustomSampler) -> DataLoader[Any]:
    """Return the loader of a training.

    Of a `TensorDataset` the rows of a batch are taken at once, which gives the same batches, and is faster.
    """
    dataset: Any = dataset_of(task)
    if type(dataset) is TensorDataset:
        return DataLoader(dataset, batch_size=None, sampler=sampler, collate_fn=tuple)
    return DataLoader(dataset, batch_sampler=sampler)


@contextmanager
def limited_threads(number: int) -> Iterator[None]:
    """Let torch use so many threads within a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
