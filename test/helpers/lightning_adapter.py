"""An ordinary script of Lightning around our strategies, as docs/trainers/lightning.md writes it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset

from helpers.trainings import CASES, EVALUATED, Trained, TrainerCase, note_rates
from helpers.yardstick import MICROBATCH, REF
from variable_batch_size.integrations.lightning import VariableBatchModelParallelStrategy, VariableBatchStrategy

ALLOWED = (  # warnings of Lightning that are not about what is tested
    r"AdaScale's gain is meant for SGD",
    r"torch.distributed.nn.functional.all_gather is deprecated",  # which Lightning calls
    r"Checkpoint directory .* exists and is not empty",
    r"The '(val|train)_dataloader' does not have many workers",
    r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided",
)


class Module(pl.LightningModule):
    """A module in the usual style."""

    def __init__(self, case: TrainerCase = CASES[0]) -> None:
        super().__init__()
        self.case, self.net = case, case.model()
        self.rates: list[float] = []
        self.evaluations: list[float] = []

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if mesh is not None and not isinstance(next(self.net.parameters()), DTensor):
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, target = batch
        if not self.case.counting:
            return self.case.loss(self.net(x), target)
        return {"loss": self.case.loss(self.net(x), target, "sum"), "count": self.case.count(target)}

    def configure_optimizers(self) -> Any:
        inner = self.case.optimizer(self.net)
        self.rates = note_rates(inner)
        scheduler = self.case.scheduler(inner)
        return [inner], [] if scheduler is None else [{"scheduler": scheduler, "interval": "step"}]


class Evaluated(Module):
    """A module with an evaluation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("evaluated", self.case.loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.evaluations.append(float(self.trainer.callback_metrics["evaluated"]))


class Record(pl.Callback):
    """Keeps what callbacks see of each update."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ends: list[int] = []  # updates that Lightning takes for the last one of an epoch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.rates.clear()  # of the step that torch makes to restore sharded states

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends += [trainer.global_step] * trainer.is_last_batch
        self.losses.append(float(trainer.callback_metrics["update_loss_step"]))
        assert float(outputs["loss"]) == self.losses[-1]


def strategy_for(case: TrainerCase = CASES[0], **options: Any) -> Any:
    """The line that changes."""
    if case.counting:
        options["optimizer_options"] = {"reduction": "sum"}
    if case.wrapper != "fsdp2":
        return VariableBatchStrategy(case.trace, case.rule, REF, **options)
    sizes = {"data_parallel_size": ranks(), "tensor_parallel_size": 1}
    return VariableBatchModelParallelStrategy(case.trace, case.rule, REF, **(sizes | options))


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def trainer(**options: Any) -> pl.Trainer:
    """A quiet Trainer of 3 epochs on the CPU."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": CASES[0].epochs}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": ranks()}
    return pl.Trainer(**(quiet | {"strategy": strategy_for()} | options))


def loader(data: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(CASES[0].dataset() if data is None else data, MICROBATCH, shuffle=True, **options)


class SaveAt(ModelCheckpoint):
    """Lightning's callback, after some updates."""

    def __init__(self, folder: Path, updates: Collection[int]) -> None:
        options = {"filename": "at-{step}", "auto_insert_metric_name": False}
        super().__init__(folder, every_n_train_steps=1, save_top_k=-1, **options)
        self.updates = updates

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step in self.updates:
            super().on_train_batch_end(trainer, *rest)


class Lightning:
    """The trainer, for the laws that all trainers keep."""

    def fit(
        self, case: TrainerCase, folder: Path, *, save_at: Collection[int] = (), resume: Path | None = None
    ) -> Trained:
        module, record = (Evaluated if case.patience else Module)(case), Record()
        callbacks: list[Any] = [record, *([SaveAt(folder, save_at)] if save_at else [])]
        if case.patience:
            callbacks.append(EarlyStopping("evaluated", mode="max", patience=case.patience))
        options: dict[str, Any] = {"gradient_clip_val": case.clip, "enable_checkpointing": bool(save_at)}
        run = trainer(max_epochs=case.epochs, strategy=strategy_for(case), callbacks=callbacks, **options)
        evaluated = DataLoader(Subset(case.dataset(), range(EVALUATED)), 50) if case.patience else None
        data = loader(case.dataset(), num_workers=case.workers)
        run.fit(module, data, evaluated, ckpt_path=None if resume is None else f"{resume}.ckpt")
        optimizer: Any = run.optimizers[0]
        assert run.global_step == optimizer.updates
        assert isinstance(module.net, FSDPModule) == (case.wrapper == "fsdp2")
        return Trained.of(module.net, optimizer, record.losses, module.rates, evaluations=module.evaluations)
