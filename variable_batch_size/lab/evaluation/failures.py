"""Which trainings failed: those that diverged, did not reach their end, or learned less than half of the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from variable_batch_size.lab.evaluation.end import End, reached
from variable_batch_size.lab.evaluation.records import REFERENCE

if TYPE_CHECKING:
    import pandas as pd

LEARNED = 10  # the reference must be this many of its standard deviations below the untrained model; else no loss fails


def is_reference(trainings: pd.DataFrame) -> pd.Series[bool]:
    """Return which trainings of a task are the reference's: the constant rule at its batch size, under any name."""
    named = trainings["trace"] == REFERENCE
    if named.any():
        return named
    sizes = trainings["curve"].map(constant_batchsize)
    return (trainings["rule"] == "constant") & (sizes == trainings["ref_batchsize"]) & (trainings["end"] == "samples")


def reference_trainings(trainings: pd.DataFrame) -> pd.DataFrame:
    """Return the reference's trainings at its own learning rate."""
    return trainings[is_reference(trainings) & np.isclose(trainings["lr_factor"], 1)]


def constant_batchsize(curve: Mapping[str, Sequence[Any]]) -> float:
    """Return the batch size of a training if it is constant, nan if it changes.

    Updates at the end of an epoch or of the training may be smaller: the mean between two evaluations may be 2 % less,
    and at the end any number.
    """
    mean_sizes = curve.get("batch_size", [])[1:]  # means since the evaluation before; the first one is of no update
    largest_sizes = curve.get("batch_most", curve.get("batch_size", []))[1:]
    means = mean_sizes[:-1] or mean_sizes  # without the last one, of the end of the training
    is_constant = len(set(largest_sizes)) == 1 and all(size >= 0.98 * largest_sizes[0] for size in means)
    return float(largest_sizes[0]) if is_constant else np.nan


def failure_limit(trainings: pd.DataFrame) -> float:
    """Return the final loss above which a training of a task failed, under every trace: (u + r) / 2.

    u is the loss of the untrained model, and r the median final loss of the reference's trainings. It is infinite if
    the reference was not trained, or learned less than ten standard deviations of its trainings (of those below the
    limit): then only a training that diverged failed.

    Args:
        trainings: those of a task, with a column `loss`, the final one.
    """
    at_reference = reference_trainings(trainings)
    losses = at_reference.loc[at_reference["status"] == "finished", "loss"].dropna().to_numpy(np.float64)
    if not len(losses):
        return np.inf
    untrained, reference = float(trainings["untrained"].median()), float(np.median(losses))
    limit = (untrained + reference) / 2
    below = losses[losses <= limit]  # without trainings of the reference that failed themselves
    deviation = float(below.std(ddof=1)) if len(below) > 1 else 0.0
    return limit if untrained - reference > LEARNED * deviation else np.inf


def find_failed(trainings: pd.DataFrame) -> pd.Series[bool]:
    """Return which trainings of a task failed; one that was killed did not.

    Args:
        trainings: those of a task, with a column `loss`, the final one.
    """
    ends = zip(trainings["end"], trainings["curve"], strict=True)
    is_short = np.array([not _reached_its_end(end, curve) for end, curve in ends], bool)
    has_learned_little = trainings["loss"] > failure_limit(trainings)
    finished = trainings["status"] == "finished"
    return (trainings["status"] == "diverged") | finished & (has_learned_little | is_short)


def _reached_its_end(text: str, curve: dict[str, list[float]]) -> bool:
    """Return whether a training has reached the amount of its end, such as of seconds; True for an end in samples.

    Args:
        text: the end, as a cell has it.
        curve: the columns of the training's curve.
    """
    end = End.parse(text)
    return end.amount is None or reached((curve.get(end.by) or [0.0])[-1] / end.amount)
