"""A module and trainings for the tests with Lightning, on one process and on several."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.yardstick import (
    EPOCHS,
    MAX_GRAD_NORM,
    MICROBATCH,
    REF,
    TRACE,
    UPDATES,
    Samples,
    by_hand,
    difference,
    network,
    twin_of,
    weights,
)
from variable_batch_size.integrations.lightning import VariableBatchStrategy

STOPS = (5, 11, 14, 21, 24)  # updates after which runs are resumed: 11 and 21 end an epoch


def inner_of(name: str, model: nn.Module) -> Optimizer:
    """An optimizer of torch by its name."""
    if name == "SGD":
        return SGD(model.parameters(), lr=0.1, momentum=0.9)
    return AdamW(model.parameters(), lr=1e-2)


class Classifier(pl.LightningModule):
    """A module in the usual style."""

    def __init__(self, optimizer: str = "SGD", dropout: float = 0.0, *, schedule: bool = False, manual: bool = False):
        super().__init__()
        self.net = network(dropout)
        self.optimizer_name, self.schedule = optimizer, schedule
        self.automatic_optimization = not manual
        self.lengths: list[int] = []  # of each batch's microbatches
        self.estimate: float = 0

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        return nn.functional.cross_entropy(self.net(x), target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.schedule:
                scheduler: Any = self.lr_schedulers()
                scheduler.step()
        return loss

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        optimizer = inner_of(self.optimizer_name, self.net)
        if not self.schedule:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 7, 0.5), "interval": "step"}}


def loader(**options: Any) -> DataLoader[Any]:
    """The training's loader, as a user writes it."""
    return DataLoader(Samples(), **({"batch_size": MICROBATCH, "shuffle": True} | options))


def strategy(rule: str = "root", trace: Any = TRACE, **options: Any) -> VariableBatchStrategy:
    """The line that changes."""
    return VariableBatchStrategy(trace, rule, REF, **options)


def trainer(**options: Any) -> pl.Trainer:
    """A quiet Trainer of 3 epochs on the CPU, with as many devices as there are ranks."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": EPOCHS}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    world = dist.get_world_size() if dist.is_initialized() else 1
    return pl.Trainer(**(quiet | {"devices": world, "strategy": strategy()} | options))


def fit(module: pl.LightningModule, ckpt_path: Path | None = None, data: Any = None, **options: Any) -> pl.Trainer:
    """Train a module, and return the Trainer."""
    run = trainer(**options)
    run.fit(module, loader() if data is None else data, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return run


def expected(
    optimizer: str = "SGD", *, schedule: bool = False, clip: bool = False, rule: str = "root", updates: int = UPDATES
) -> Tensor:
    """The weights of a training by hand."""
    model = network()
    inner = inner_of(optimizer, model)
    scheduler = StepLR(inner, 7, 0.5) if schedule else None
    norm = MAX_GRAD_NORM if clip else None
    by_hand(model, inner, rule=rule, max_grad_norm=norm, scheduler=scheduler, updates=updates)
    return weights(model)


def saver(folder: Path, **options: Any) -> ModelCheckpoint:
    """A callback that saves after every update."""
    every: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"}
    return ModelCheckpoint(folder, **(every | options))


def saved(folder: Path, update: int) -> Path:
    """The checkpoint after an update."""
    return folder / f"step={update}.ckpt"


def quieten() -> None:
    """Turn warnings into errors, but those of Lightning that are not about what is tested."""
    warnings.simplefilter("error")
    for message in ALLOWED:
        warnings.filterwarnings("ignore", message)


ALLOWED = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning with torch 2.15
    r"Checkpoint directory .* exists and is not empty",
    r"The number of training batches .* is smaller than the logging interval",
    r"The 'val_dataloader' does not have many workers",
    r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided",
)


# Jobs of several processes. ------------------------------------------------------------------------------------------


def yardstick_job(folder: Path) -> None:
    """The combinations of the yardstick, and what is logged."""
    quieten()
    pl.seed_everything
    for optimizer in ("SGD", "AdamW"):
        module = Classifier(optimizer, schedule=True)
        run = fit(module, gradient_clip_val=MAX_GRAD_NORM)
        assert (run.global_step, run.current_epoch) == (UPDATES, EPOCHS)
        assert difference(module.net, expected(optimizer, schedule=True, clip=True)) < 1e-12
    check_logs(module, run)
    module = Classifier()
    fit(module, strategy=strategy("adascale"))
    assert difference(module.net, expected(rule="adascale")) < 1e-12
    module = Classifier(manual=True, schedule=True)
    run = fit(module)
    assert run.global_step == UPDATES
    assert difference(module.net, expected(schedule=True)) < 1e-12
    check_logs(module, run)


def check_logs(module: Classifier, run: pl.Trainer) -> None:
    """The logged loss is that of the last update, on all ranks."""
    assert set(run.callback_metrics) >= {"loss_step", "loss_epoch"}
    del module


def save_job(folder: Path, name: str) -> None:
    """A training that saves after every update."""
    quieten()
    torch.manual_seed(3 + (dist.get_rank() if dist.is_initialized() else 0))
    module = Classifier(dropout=0.5 if name == "dropout" else 0.0)
    fit(module, callbacks=[saver(folder / name)], enable_checkpointing=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(weights(module.net), folder / name / "weights.pt")


def resume_job(folder: Path, name: str, stops: Sequence[int], tolerance: float) -> None:
    """Trainings that resume after updates of `save_job`."""
    quieten()
    for stop in stops:
        torch.manual_seed(100)
        module = Classifier(dropout=0.5 if name == "dropout" else 0.0)
        run = fit(module, saved(folder / name, stop))
        assert (run.global_step, run.current_epoch) == (UPDATES, EPOCHS), stop
        found = difference(module.net, torch.load(folder / name / "weights.pt"))
        assert found <= tolerance, (stop, found)


def unused() -> Any:
    """Names for the tests that import from here."""
    return vbs, twin_of
