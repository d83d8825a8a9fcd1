"""Modules for the tests with Lightning that log torchmetrics objects, normalize batches or fail; their trainings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassRecall
from torchmetrics.utilities import dim_zero_cat

from helpers.lightning_jobs import Classifier, Validated, fit, loader, strategy
from helpers.yardstick import SAMPLES, samples


class Largest(Metric):
    """The largest value, by a list of all of them."""

    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        return dim_zero_cat(self.values).max()


class Measured(Classifier):
    """A module that logs torchmetrics objects, and keeps what they say after each update, and of what."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.f1 = MulticlassF1Score(5, average="macro", **options)  # which is no mean of those of microbatches
        self.both = MetricCollection(
            {"accuracy": MulticlassAccuracy(5, average="micro"), "recall": MulticlassRecall(5, average="micro")}
        )
        self.seen = SumMetric()
        self.error, self.largest = MeanSquaredError(), Largest()  # of values that have a gradient
        self.steps: list[dict[str, float]] = []
        self.updates: list[tuple[Tensor, Tensor]] = []
        self.last: list[tuple[Tensor, Tensor]] = []  # microbatches of the updates
        self.parts: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output, target = self.net(batch[0]), batch[1]
        for metric in self.f1, self.both:
            metric(output, target)
        self.seen(len(target))
        self.error(output[:, 0], target.double())
        self.largest(output[:, 0])
        for name, metric in ("f1", self.f1), ("error", self.error), ("largest", self.largest):
            self.log(name, metric, on_step=True, on_epoch=True)
        rows = {"on_step": False, "on_epoch": True, "batch_size": len(target)}  # which a user may say
        self.log_dict({"target": target.double().mean()}, sync_dist=True, **rows)
        self.log("seen", self.seen, on_step=True, on_epoch=True)
        self.log_dict(self.both, on_step=True, on_epoch=True)
        self.log("rows", float(len(target)), on_step=True, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.parts.append((output.detach(), target))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})
        outputs, targets = zip(*self.parts, strict=True)
        self.updates.append((torch.cat(outputs), torch.cat(targets)))
        self.last.append(self.parts[-1])
        self.parts = []


class Normalized(Validated):
    """A module with batch normalization, which keeps its statistics in validations."""

    def __init__(self, failing: bool = False) -> None:
        super().__init__()
        self.net[1] = nn.Sequential(nn.BatchNorm1d(self.net[0].out_features).double(), self.net[1])
        self.failing, self.statistics = failing, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.failing and self.trainer.global_step == 5 and dist.get_rank() == 1:
            raise KeyError("on purpose")
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.statistics.append(torch.cat([buffer.double().view(-1) for buffer in self.net.buffers()]))


def metrics_job(folder: Path) -> None:
    """Metrics, of an update of one sample too, of which the other rank computes a replay, and batch normalization."""
    for options in {"dist_sync_on_step": True}, {}:
        module = Measured(**options)
        run = fit(module, max_epochs=1, strategy=strategy(trace="0:24 3:10 4:1 5:24"))
        sizes = [24, 24, 24, 10, 1, 24, 24, 24, 24, 24]
        assert [step["rows_step"] for step in module.steps] == sizes
        counts = {name: float(run.callback_metrics[name]) for name in ("rows_epoch", "seen_epoch")}
        assert counts == {"rows_epoch": SAMPLES, "seen_epoch": SAMPLES}  # a replay does not count
        assert float(run.callback_metrics["target"]) == pytest.approx(float(samples()[1].double().mean()), rel=1e-6)
        assert float(run.callback_metrics["recall_epoch"]) == float(run.callback_metrics["accuracy_epoch"])
    data = {"train_dataloaders": loader(), "val_dataloaders": loader(shuffle=False)}
    trained = Normalized()
    fit(trained, data=data, max_epochs=2)
    assert len({*torch.stack(trained.statistics)[:, 0].tolist()}) > 1


def exception_job(folder: Path) -> None:
    """An exception on one of two processes, with a checkpoint at exceptions: the other one is told."""
    kind, message = (KeyError, "on purpose") if dist.get_rank() else (RuntimeError, "restart all ranks from the last")
    data = {"train_dataloaders": loader(), "val_dataloaders": loader(shuffle=False)}
    with pytest.raises(kind, match=message):
        fit(Normalized(failing=True), data=data, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True)
    (folder / f"told {dist.get_rank()}").touch()
    os._exit(0)  # without waiting for the other one
