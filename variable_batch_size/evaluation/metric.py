"""Whether less of a metric is better: by its name."""

from __future__ import annotations

import re

from variable_batch_size._validation import value_error

ALWAYS_LESS = ("loss", "error")
LESS = ("perplexity", "entropy", "distance", "deviance", "divergence")
LESS_WHOLE = {"err", "mse", "rmse", "mae", "mape", "nll", "ppl", "bpc", "bpb", "wer", "cer", "fid", "ece", "brier"}
MORE = ("accuracy", "score", "precision", "recall", "correlation", "reward", "correct", "elbo")
MORE_WHOLE = {"acc", "f1", "auc", "auroc", "ap", "map", "bleu", "rouge", "r2", "iou", "miou", "psnr", "ssim", "dice"}
MORE_WHOLE |= {"top1", "top5", "mcc", "kappa", "return", "returns"}


def lower_is_better(metric: str) -> bool:
    """Return whether less of a metric is better, of losses and errors, or more, of accuracies and scores.

    Raises:
        ValueError: if the name does not tell.
    """
    name = metric.lower()
    parts = set(re.split(r"[^a-z0-9]+", name))
    if any(word in name for word in ALWAYS_LESS):  # also a dice_loss
        return True
    less = parts & LESS_WHOLE or any(word in name for word in LESS)
    more = parts & MORE_WHOLE or any(word in name for word in MORE)
    if bool(less) == bool(more):
        requirement = f"the name of the metric {metric} must tell whether less of it is better"
        found = "both words for less and for more" if less else "no word that tells"
        raise value_error(requirement, found, 'add "loss" or "error" to its name in evaluate(), or "score"')
    return bool(less)
