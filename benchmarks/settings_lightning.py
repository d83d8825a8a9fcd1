"""Modules of Lightning, and what records their hooks, for comparing a plain training with ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as lrs
from torch.utils.data import IterableDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from helpers.our_order import loader
from helpers.yardstick import CLASSES, Samples, network

REPEATED = "on_before_zero_grad", "on_before_backward", "on_after_backward"  # run for each microbatch


class Classifier(pl.LightningModule):
    """A module in the usual style, in float64, that records its hooks; `step` logs, and `rates` are its schedules."""

    def __init__(self, step: Any = None, optimizer: Any = None, rates: Any = None) -> None:
        super().__init__()
        self.net, self.accuracy, self.mean = network(), MulticlassAccuracy(CLASSES), MeanMetric()
        self.several = MetricCollection({"top": MulticlassAccuracy(CLASSES), "two": MulticlassAccuracy(CLASSES, 2)})
        self.step, self.rates, self.optimizer = step or logs(), rates, optimizer or SGD
        self.events: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        x, target = batch.values() if isinstance(batch, dict) else batch
        self.output, self.target = self.net(x.to(self.net[0].weight.dtype)), target
        return nn.functional.cross_entropy(self.output.double(), target)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return what `step` does, or the loss."""
        loss = self.loss(batch)
        returned = self.step(self, loss)
        return loss if returned is None else returned or None

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)
        self.accuracy(self.output, self.target)
        self.log("val_accuracy", self.accuracy)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self)
        return optimizer if self.rates is None else ([optimizer], self.rates(optimizer))


SGD: Any = lambda module: optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1, 0.9)  # noqa: E731
ADAMW: Any = lambda module: optim.AdamW(  # noqa: E731
    [{"params": [*module.net[0].parameters()], "weight_decay": 0.1}, {"params": [*module.net[2].parameters()]}], 0.01
)


def logs(**options: Any) -> Callable[[Any, Tensor], None]:
    return lambda module, loss: module.log("loss", loss, **options)


def logged(found: Any) -> dict[str, Any]:
    return {name: float(value) for name, value in found.items()}


def rates(
    kind: Any, interval: str = "step", *, of: Any = None, frequency: int = 1, monitor: Any = None, **how: Any
) -> Any:
    options = {"interval": interval, "frequency": frequency, **({"monitor": monitor} if monitor else {})}
    return partial(of or Classifier, rates=lambda optimizer: [{"scheduler": kind(optimizer, **how), **options}])


class NoValidation(Classifier):
    """A module without a validation."""

    validation_step = None  # type: ignore[assignment]


class Hooks(Classifier):
    """A module with hooks of its own, which record."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Warm up, as Lightning's guide does."""
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 20)
        self.events.append(("optimizer_step", epoch, batch_idx, self.trainer.global_step))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step by hand."""
        self.events.append(("lr_scheduler_step", self.trainer.global_step, metric))
        scheduler.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", nn.utils.get_total_norm(p.grad for p in self.net.parameters() if p.grad is not None))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict({"rows": float(len(batch[0])), "end_loss": outputs["loss"]}, on_step=True, on_epoch=True)
        self.trainer.should_stop |= self.trainer.global_step == 30

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", float(self.current_epoch))


class Scaled(Classifier):
    """A module that scales its data."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]


class Logging(Classifier):
    """A module that logs in other hooks than `training_step`."""

    def on_train_epoch_start(self) -> None:
        self.log("epoch_start", 1.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_idx", float(batch_idx), on_step=True, on_epoch=True)
        self.logger.log_metrics({"rows": float(len(batch[0]))}, self.global_step)  # type: ignore[union-attr]

    def on_after_backward(self) -> None:
        self.log("step", float(self.global_step), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("last", self.trainer.callback_metrics.get("loss", 0.0))


class Manual(Classifier):
    """Two networks with an optimizer each, by hand."""

    def __init__(self, step: Any = None) -> None:
        super().__init__(step)
        self.automatic_optimization = False
        self.head = nn.Linear(6, CLASSES, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        losses = self.loss(batch), nn.functional.cross_entropy(self.head(batch[0]), batch[1])
        for loss, optimizer in zip(losses, self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            schedule.step()
        self.log_dict({"one": losses[0], "two": losses[1]}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        both = [optim.SGD(self.net.parameters(), 0.1, 0.9), optim.AdamW(self.head.parameters(), 0.01)]
        return both, [lrs.StepLR(one, 5, 0.5) for one in both]


class Tuned(Classifier):
    """A module with a backbone, or with a frozen layer."""

    def __init__(self, step: Any = None, frozen: bool = False) -> None:
        super().__init__(step, optimizer=SGD if frozen else lambda module: SGD(module.net[1:]))
        self.backbone = self.net[0]
        if frozen:
            self.backbone.requires_grad_(False)


class Data(pl.LightningDataModule):
    """A data module."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.train_dataloader = lambda: loader(plain)  # type: ignore[method-assign]
        self.val_dataloader = lambda: [loader(True, batch_size=50), loader(True, batch_size=70)]  # type: ignore


class Stream(IterableDataset[Any]):
    """A dataset without an index."""

    def __iter__(self) -> Any:
        return iter([Samples()[index] for index in range(40)])


def metrics(module: Any, loss: Tensor, **options: Any) -> None:
    output, target = module.output.detach(), module.target
    module.several.update(output, target)
    module.mean(loss.detach().float(), weight=len(target))
    module.log_dict(module.several, on_step=False, on_epoch=True)
    module.log("mean", module.mean, **{"on_step": False, "on_epoch": True, **options})


def gradients(trainer: Any, module: Any, *_: Any) -> None:
    module.log("gradients", float(module.net[0].weight.grad is not None))


def evaluate(trainer: Any, module: Any) -> Any:
    data = loader(True, batch_size=40)
    return [trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)]


class Recorder(pl.Callback):
    """Records every hook with the counters of the Trainer; those of `REPEATED` once an update."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.once: set[Any] = set()

    def note(self, name: str, trainer: Any, module: Any, *rest: Any, **named: Any) -> None:
        loop, length = trainer.fit_loop, trainer.num_training_batches if "train_" in name else 0  # ours is known before
        event = name, trainer.global_step, trainer.current_epoch, loop.batch_idx, length, module.training
        if name == "on_train_batch_start":
            self.once.clear()
        if name in REPEATED and event in self.once:
            return
        self.once.add(event)
        seen = logged(trainer.callback_metrics) if "end" in name else {}
        rates = [group["lr"] for each in trainer.optimizers for group in each.param_groups]
        extra: list[Any] = [trainer.is_last_batch, trainer.should_stop, seen, rates]
        if "batch" in name and "on_" in name:
            *outputs, batch, index = rest[:3] if "end" in name else rest[:2]
            extra += [index, [*(batch.values() if isinstance(batch, dict) else batch)], *outputs]
        if name == "on_before_optimizer_step":
            extra.append(
                [p.grad.clone() for group in rest[0].param_groups for p in group["params"] if p.grad is not None]
            )
        self.events.append((*event, *extra))


for hook in dir(pl.Callback):
    if hook.startswith("on_") or hook in ("setup", "teardown"):
        setattr(Recorder, hook, lambda self, *args, _name=hook, **named: self.note(_name, *args, **named))
