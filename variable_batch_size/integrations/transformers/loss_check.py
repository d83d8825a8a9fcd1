"""Losses that are no mean over rows or labels are found in the first update: one microbatch in two halves."""

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
_NARROW = 3e-2  # with bfloat16, also by autocast


def check_loss(trainer: Any, microbatch: Any, rows: int) -> None:
    """Warn if the loss of a microbatch is not the mean of those of its halves, weighed by their labels or rows.

    The forwards have no gradients and no dropout, and leave the random states as they were. Every rank has to call it.

    Args:
        trainer: the trainer.
        microbatch: what its loader has yielded.
        rows: the rows of it.
    """
    parts = _split(microbatch, rows) or _collated(trainer, rows)
    with torch.no_grad(), _undisturbed(trainer):
        losses, weights = [], []
        for part, number in parts:
            count = trainer.labels_of(part)
            loss = trainer.compute_loss(trainer.model, trainer.on_device(part), num_items_in_batch=count)
            losses.append(float(loss))
            weights.append(number if count is None else float(count))
    whole, first, second = losses
    if len({id(part) for part, _ in parts}) < 3 or not all(map(math.isfinite, losses)):
        return  # one row, on this rank
    mean = (weights[1] * first + weights[2] * second) / (weights[1] + weights[2])
    dtype = next(trainer.model.parameters()).dtype
    close = _NARROW if trainer.args.bf16 else _CLOSE.get(dtype, _NARROW)
    if abs(mean - whole) > close * max(abs(whole), abs(first), abs(second)):
        warnings.warn(
            f"an update is the mean over all its samples only if the loss is a mean over rows or labels, but the loss "
            f"of a microbatch of {rows} rows is {whole:.6g} and the mean of those of its halves {mean:.6g}, as with "
            f"class weights, contrastive losses, sums and several terms: the update depends on "
            f"per_device_train_batch_size; return a mean over rows or labels, or pass check_loss=False (see "
            f"docs/trainers/transformers.md)",
            UserWarning,
            stacklevel=stacklevel_of_user(),
        )


Parts = Sequence[tuple[Any, int]]  # the whole and its halves, each with its rows


def _split(microbatch: Any, rows: int) -> Parts | None:
    """Return a microbatch and its halves; None if a tensor of it has not one row for each sample."""
    if not isinstance(microbatch, Mapping):
        return None
    tensors = {name: value for name, value in microbatch.items() if isinstance(value, Tensor) and value.dim()}
    if not tensors or any(len(value) != rows for value in tensors.values()):
        return None
    if rows < 2:
        return [(microbatch, rows)] * 3  # all ranks make equally many forwards
    half = rows // 2
    first = {**microbatch, **{name: value[:half] for name, value in tensors.items()}}
    second = {**microbatch, **{name: value[half:] for name, value in tensors.items()}}
    return [(dict(microbatch), rows), (first, half), (second, rows - half)]


def _collated(trainer: Any, rows: int) -> Parts:
    """Return the first rows of the dataset and their halves, as the collator of the training makes them."""
    loader = trainer.update_loader.loader
    rows = min(max(rows, 2), len(loader.dataset))
    items = [loader.dataset[number] for number in range(rows)]

    def collated(part: Sequence[Any]) -> tuple[Any, int]:
        return loader.collate_fn([copy.copy(item) for item in part]), len(part)  # some collators change what they get

    half = rows // 2
    return [collated(items)] * 3 if half == 0 else [collated(items), collated(items[:half]), collated(items[half:])]


@contextmanager
def _undisturbed(trainer: Any) -> Iterator[None]:
    """Restore, after a block, what forwards and `compute_loss` change: modes of modules, random states and logs."""
    modules: list[nn.Module] = list(trainer.model.modules())
    modes = [module.training for module in modules]
    kept = logged_by_loss(trainer)
    states = get_rng_states()
    trainer.model.eval()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        vars(trainer).update(kept)
        set_rng_states(states)
