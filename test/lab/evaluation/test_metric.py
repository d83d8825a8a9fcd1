"""Whether less of a metric is better."""

from __future__ import annotations

import pytest

from variable_batch_size.lab.evaluation.metric import lower_is_better


@pytest.mark.parametrize(
    "metric", ["loss", "val_loss", "dice_loss", "top1_error", "perplexity", "mse", "val/nll", "WER"]
)
def test_less_is_better(metric):
    assert lower_is_better(metric)


@pytest.mark.parametrize("metric", ["accuracy", "top5", "F1", "val_auc", "bleu", "score", "r2"])
def test_more_is_better(metric):
    assert not lower_is_better(metric)


@pytest.mark.parametrize("metric", ["speed", "negative_log_likelihood", "brier_score", "semblance"])
def test_a_name_that_does_not_tell_is_refused(metric):
    with pytest.raises(ValueError, match=f"the name of the metric {metric} must tell whether less of it is better"):
        lower_is_better(metric)
