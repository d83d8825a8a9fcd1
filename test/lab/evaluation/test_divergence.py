"""What is a divergence, and what an error of the task; metrics that are not finite; and controllers by their names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.evaluation_tasks import Tiny
from variable_batch_size import AdaptiveTrace
from variable_batch_size.lab.evaluation import Experiment, Record, read_records, run

HERE = f"{__name__}:"


class OtherMetrics(Tiny):
    """One metric is infinite before the training, another one is never a number."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = super().evaluate(model)
        return found | {"perplexity": math.inf if found["loss"] > 5 else found["loss"], "f1": math.nan}


class NeverFinite(Tiny):
    """Its evaluation is not finite before the training."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": math.nan}


class Scaled(Tiny):
    """Its training loss is 20 times that of the evaluation."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return 20 * super().loss(model, batch)


class Heavy(Tiny):
    """The losses of its samples differ by a factor of a thousand, so that a batch of one tells little."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, outputs = batch
        factor = torch.where(inputs[:, :1] > 1.5, 30.0, 0.03)
        return (factor * (model(inputs) - outputs).square()).mean()


class Overflows(Tiny):
    """Its evaluation is a power, which overflows if the loss is large."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = super().evaluate(model)
        return found | {"perplexity": math.exp(found["loss"])}


class Divides(Tiny):
    """A mistake of its evaluation, which only a trained model meets."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = super().evaluate(model)
        return found | {"precision": 1 / (0 if found["loss"] < 4 else 1)}


class NotANumber(Tiny):
    """Its loss is no number from the beginning."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * math.nan


class Fixed(Tiny):
    """Its optimizer has a learning rate of its own."""

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return super().optimizer(model, 0.1)


class Unchanged(Tiny):
    """It is as it is."""


class Differentiates(Tiny):
    """Its evaluation leaves gradients, as one of the sensitivity to the inputs does."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with torch.enable_grad():
            model(self.inputs[:8]).sum().backward()
        return super().evaluate(model)


class Checks(Tiny):
    """Its loss raises if the weights are not finite."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not all(bool(one.isfinite().all()) for one in model.parameters()):
            raise ValueError("the mean of a distribution must be finite")
        return super().loss(model, batch).nan_to_num(1.0, 1.0)


class ChecksLater(Tiny):
    """Its loss raises if an output is too large, while the weights are finite."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model(batch[0]).abs().max() > 1e6:
            raise ValueError("the mean of a distribution must be at most 1e6")
        return super().loss(model, batch)


class Raises(Tiny):
    """Its loss raises after some microbatches."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == 9:
            raise ValueError("an error of the task")
        return super().loss(model, batch)


def records(task: str, folder: Path, **other: Any) -> list[Record]:
    arguments: dict[str, Any] = {"traces": ["8"], "rules": ["constant"], "seeds": 1} | other
    return run(Experiment([HERE + task], **arguments), folder, progress=False)


def test_a_metric_that_is_not_finite_is_missing_in_a_row_that_stays(tmp_path: Path) -> None:
    (found,) = records("OtherMetrics", tmp_path)
    (plain,) = run(Experiment(["helpers.evaluation_tasks:Tiny"], ["8"], ["constant"], 1), tmp_path, progress=False)
    assert found.status == "finished"
    assert found.curve["loss"] == plain.curve["loss"]
    perplexity, f1 = found.curve["perplexity"], found.curve["f1"]
    assert perplexity is not None
    assert f1 is not None
    assert perplexity[0] is None
    assert perplexity[-1] == found.curve["loss"][-1]  # type: ignore[index]
    assert set(f1) == {None}
    assert len(read_records(tmp_path)) == 2


def test_an_untrained_model_without_a_finite_loss_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="evaluate\\(\\) must return a finite loss of the untrained model, got nan"):
        records("NeverFinite", tmp_path)
    assert not read_records(tmp_path)


def test_a_training_loss_of_another_scale_is_no_divergence(tmp_path: Path) -> None:
    (found,) = records("Scaled", tmp_path, lr=0.0025)
    assert found.status == "finished"


def test_rare_large_losses_are_no_divergence(tmp_path: Path) -> None:
    for found in records("Heavy", tmp_path, lr=1e-12, ref_batchsize=1, traces=["1"], seeds=3):
        assert found.status == "finished"


@pytest.mark.parametrize(("task", "lr"), [("Overflows", 40.0), ("Checks", 1e20), ("ChecksLater", 2.0)])
def test_an_error_of_a_model_that_has_diverged_is_a_divergence(task: str, lr: float, tmp_path: Path) -> None:
    (found,) = records(task, tmp_path, lr=lr)
    assert found.status == "diverged"


def test_another_error_stays_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="failed: ValueError: an error of the task"):
        records("Raises", tmp_path)
    with pytest.raises(RuntimeError, match="failed: ZeroDivisionError: division by zero"):
        records("Divides", tmp_path)


def test_a_loss_that_is_no_number_before_the_first_update_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"loss\(\) must return a finite loss before the first update, got nan; mend"
    ):
        records("NotANumber", tmp_path)


def test_an_optimizer_without_the_learning_rate_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"optimizer\(model, lr\) must use lr, got lr 0.1 for 0.05 and twice it; pass it"
    ):
        records("Fixed", tmp_path, lr=0.05)


def test_gradients_of_an_evaluation_change_no_training(tmp_path: Path) -> None:
    (plain,), (other,) = (records(task, tmp_path / task, between=16) for task in ("Unchanged", "Differentiates"))
    assert plain.curve["loss"] == other.curve["loss"]


class Plain:
    """A controller that does not say what it is."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, _: Any) -> int:
        return self.size


@pytest.mark.parametrize("controller", [Plain(8), lambda _: 8])
def test_a_controller_that_does_not_tell_its_numbers_is_refused(controller: Any) -> None:
    experiment = Experiment(
        ["helpers.evaluation_tasks:Tiny"], {"own": AdaptiveTrace(controller, start=8)}, ["constant"]
    )
    with pytest.raises(ValueError, match=r"the repr of a controller must tell its numbers, .* at 0x"):
        experiment.cells()
