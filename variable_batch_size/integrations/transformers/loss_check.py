"""Losses that are no mean over rows or labels are found in the first update: one microbatch in parts."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size.checkpoint.rng_states import get_rng_states, set_rng_states
from variable_batch_size.integrations.transformers.internals import logged_by_loss

_CLOSE = {torch.float64: 1e-6, torch.float32: 2e-3}  # relative; of losses that models round to float32
_NARROW = 1e-2  # with bfloat16, also by autocast


def check_loss(trainer: Any, microbatch: Any, rows: int) -> None:
    """Warn if the loss of a microbatch is not the mean of those of its parts, weighed by their labels or rows.

    The forwards have no gradients and no dropout, and leave random states and buffers as they were. A loss that draws
    random numbers, which the whole shows twice, is not compared. Every rank has to call it.

    Args:
        trainer: the trainer.
        microbatch: what its loader has yielded; one of a single row is replaced by the first rows of the dataset.
        rows: the rows of it.
    """
    whole, *parts = _split(microbatch, rows) or _collated(trainer, max(rows, 2))
    losses, weights = [], []
    with torch.no_grad(), _undisturbed(trainer):
        for part, number in (whole, whole, *parts):
            count = trainer.labels_of(part)
            loss = trainer.compute_loss(trainer.model, trainer.on_device(part), num_items_in_batch=count)
            losses.append(float(loss))
            weights.append(number if count is None else float(count))
    again, expected, *found = losses
    if again != expected or not all(map(math.isfinite, losses)) or weights[2] == weights[1]:
        return  # it draws random numbers, or a part has no labels, or the dataset has one row
    close = _NARROW if trainer.args.bf16 else _CLOSE.get(next(trainer.model.parameters()).dtype, _NARROW)
    for (first, second), (one, other) in zip((found[:2], found[2:]), (weights[2:4], weights[4:]), strict=True):
        mean = (one * first + other * second) / (one + other)
        if abs(mean - expected) > close * max(abs(expected), abs(first), abs(second)):
            warnings.warn(
                f"an update is the mean over all its samples only if the loss is a mean over rows or labels, but the "
                f"loss of {whole[1]} rows is {expected:.6g} and the mean of those of two parts of them {mean:.6g}, as "
                f"with class weights, contrastive losses, sums and several terms: the update depends on "
                f"per_device_train_batch_size; return a mean over rows or labels, or pass check_loss=False (see "
                f"docs/trainers/transformers.md)",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )
            return


Parts = Sequence[tuple[Any, int]]  # a microbatch, its halves, its first row and the others, each with its rows


def _split(microbatch: Any, rows: int) -> Parts | None:
    """Return a microbatch and its parts; None if a tensor of it has not one row for each sample, or it has one row."""
    if rows < 2 or not isinstance(microbatch, Mapping):
        return None
    tensors = {name: value for name, value in microbatch.items() if isinstance(value, Tensor) and value.dim()}
    if not tensors or any(len(value) != rows for value in tensors.values()):
        return None

    def part(begin: int, end: int) -> tuple[Any, int]:
        return {**microbatch, **{name: value[begin:end] for name, value in tensors.items()}}, end - begin

    return [part(*ends) for ends in _ends(rows)]


def _collated(trainer: Any, rows: int) -> Parts:
    """Return the first rows of the dataset and their parts, as the collator of the training makes them."""
    loader = trainer.update_loader.loader
    items = [loader.dataset[number] for number in range(min(rows, len(loader.dataset)))]
    parts = (items[begin:end] for begin, end in _ends(len(items)))
    return [(loader.collate_fn([copy.copy(item) for item in part]), len(part)) for part in parts]  # some change theirs


def _ends(rows: int) -> list[tuple[int, int]]:
    if rows < 2:
        return [(0, rows)] * 5  # all ranks make equally many forwards
    return [(0, rows), (0, rows // 2), (rows // 2, rows), (0, 1), (1, rows)]


@contextmanager
def _undisturbed(trainer: Any) -> Iterator[None]:
    """Restore, after a block, what forwards and `compute_loss` change: modes, buffers, random states and logs."""
    modules: list[nn.Module] = list(trainer.model.modules())
    modes = [module.training for module in modules]
    kept, buffers = logged_by_loss(trainer), [(buffer, buffer.clone()) for buffer in trainer.model.buffers()]
    states = get_rng_states()
    trainer.model.eval()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for buffer, before in buffers:
            buffer.copy_(before)
        vars(trainer).update(kept)
        set_rng_states(states)
