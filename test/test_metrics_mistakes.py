"""What is said of accumulators and trackers that get what they cannot use."""

import pytest
import torch

import variable_batch_size as vbs
from helpers.measured import Measured
from helpers.mistakes import Mistake, check
from helpers.reference import training

LOCAL = vbs.backend.LocalBackend()
SOURCE = r"^an Accumulator needs the vbs.CustomOptimizer of the training loop or the vbs.Evaluation.*, got {}.*; pass"


def added_twice():
    metrics = Measured([4], dataset_size=8).metrics
    metrics.add(value=1.0)
    metrics.add(other=1.0)
    metrics.add(value=1.0)


def log(update, scalars):
    vbs.Tracker("logs").log(update, scalars)


MISTAKES = [
    Mistake(added_twice, RuntimeError, "^a microbatch takes one value for each name, .* 'value' was added twice in st"),
    Mistake(lambda: Measured([4], 8).run(2).metrics.add(value=1.0), RuntimeError, r"^add\(\) must be called before "),
    Mistake(lambda: Measured().metrics.set_epoch(-1), ValueError, "epoch must be an integer >= 0, got -1; count epoch"),
    Mistake(lambda: vbs.Accumulator(training().optimizer.inner), TypeError, SOURCE.format("SGD")),
    Mistake(lambda: vbs.Accumulator(training().sampler), TypeError, SOURCE.format("CustomSampler")),
    Mistake(lambda: vbs.Accumulator(None), TypeError, SOURCE.format("None")),
    Mistake(
        lambda: vbs.Accumulator(vbs.EvaluationSampler(4, 2, 1), backend=LOCAL),
        ValueError,
        "^the EvaluationSampler deals for rank 1 of 2, but the LocalBackend is rank 0 of 1; omit num_replicas",
    ),
    Mistake(
        lambda: vbs.Accumulator(training().optimizer, backend=LOCAL),
        ValueError,
        "^an Accumulator for training uses .*, got backend=LocalBackend; omit it",
    ),
    Mistake(lambda: log(1, {"a": "1"}), TypeError, "^the value of a must be a number, got"),
    Mistake(lambda: log(1, {"a": torch.zeros(2)}), TypeError, "^the value of a must be a number, got"),
    Mistake(lambda: log(1.5, {}), TypeError, "^update must be an integer"),
    Mistake(lambda: log(1, {"update": 1}), ValueError, '^a tag must not be empty or "update"'),
    Mistake(lambda: log(1, {"": 1}), ValueError, '^a tag must not be empty or "update"'),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_and_nothing_is_written(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(mistake)
    assert not list(tmp_path.iterdir())
