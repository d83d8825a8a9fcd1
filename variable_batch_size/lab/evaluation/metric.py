"""Whether less of a metric is better: by its name, or as the user says."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, get_args

from variable_batch_size._validation import check_choice, value_error

Mode: TypeAlias = Literal["min", "max"]
ASK = 'say so by mode="min" or mode="max"'

# Words within the name of a metric, or (WHOLE) whole parts of it, that tell whether less or more is better.
ALWAYS_LESS = ("loss", "error")
LESS = ("perplexity", "entropy", "distance", "deviance", "divergence")
LESS_WHOLE = {"err", "mse", "rmse", "mae", "mape", "nll", "ppl", "bpc", "bpb", "wer", "cer", "fid", "ece", "brier"}
MORE = ("accuracy", "score", "precision", "recall", "correlation", "reward", "correct", "elbo")
MORE_WHOLE = {"acc", "f1", "auc", "auroc", "ap", "map", "bleu", "rouge", "r2", "iou", "miou", "psnr", "ssim", "dice"}
MORE_WHOLE |= {"top1", "top5", "mcc", "kappa", "return", "returns"}


def lower_is_better(metric: str, mode: Mode | None = None, remedy: str = ASK) -> bool:
    """Return whether less of a metric is better, of losses and errors, or more, of accuracies and scores.

    Args:
        metric: its name.
        mode: "min" if less is better, "max" if more is; None: the name tells.
        remedy: what the error says to do.

    Raises:
        ValueError: if the name does not tell.
    """
    if mode is not None:
        check_choice(mode, "mode", get_args(Mode))
        if metric == "loss" and mode == "max":
            raise value_error("mode must be 'min' for the loss", repr(mode), "omit it, or choose a metric")
        return mode == "min"
    less, more = _directions(metric)
    if less == more:
        requirement = f"the name of the metric {metric} must tell whether less of it is better"
        found = "both words for less and for more" if less else "no word that tells"
        raise value_error(requirement, found, remedy)
    return less


def _directions(metric: str) -> tuple[bool, bool]:
    """Return whether the name of a metric has a word for "less is better", and whether it has one for "more is better".

    >>> _directions("val_accuracy"), _directions("dice_loss"), _directions("size")
    ((False, True), (True, False), (False, False))
    """
    name = metric.lower()
    parts = set(re.split(r"[^a-z0-9]+", name))
    if any(word in name for word in ALWAYS_LESS):  # also a dice_loss
        return True, False
    less = parts & LESS_WHOLE or any(word in name for word in LESS)
    more = parts & MORE_WHOLE or any(word in name for word in MORE)
    return bool(less), bool(more)
