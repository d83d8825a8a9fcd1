"""A module and trainings for the tests with Lightning, on one process and on several."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.reference import batches
from helpers.yardstick import (
    ENDS,
    EPOCHS,
    MAX_GRAD_NORM,
    MICROBATCH,
    REF,
    SAMPLES,
    SIZES,
    TRACE,
    UPDATES,
    Samples,
    by_hand,
    network,
    weights,
)
from variable_batch_size.integrations.lightning import VariableBatchModelParallelStrategy, VariableBatchStrategy


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


class Sharded(Classifier):
    """The same, sharded by FSDP2 as users of Lightning write it."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if mesh is not None and not isinstance(self.net[0].weight, DTensor):
            for part in self.net[0], self.net[-1], self.net:
                fully_shard(part, mesh=mesh["data_parallel"])


def whole(model: nn.Module) -> Tensor:
    """All parameters in one vector, gathered from their shards."""
    parts = (each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters())
    return torch.cat([part.detach().flatten() for part in parts]).clone()


def difference(model: nn.Module, wanted: Tensor) -> float:
    """The largest difference of a weight from `wanted`, relative to the largest one there."""
    return float((whole(model) - wanted).abs().max() / wanted.abs().max())


def loader(**options: Any) -> DataLoader[Any]:
    """The training's loader, as a user writes it."""
    return DataLoader(Samples(), **({"batch_size": MICROBATCH, "shuffle": True} | options))


def strategy(rule: str = "root", trace: Any = TRACE, **options: Any) -> VariableBatchStrategy:
    """The line that changes."""
    return VariableBatchStrategy(trace, rule, REF, **options)


def sharded(rule: str = "root", trace: Any = TRACE, **options: Any) -> VariableBatchModelParallelStrategy:
    """The line that changes with ModelParallelStrategy."""
    sizes = {"data_parallel_size": ranks(), "tensor_parallel_size": 1}
    return VariableBatchModelParallelStrategy(trace, rule, REF, **(sizes | options))


def ranks() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def trainer(**options: Any) -> pl.Trainer:
    """A quiet Trainer of 3 epochs on the CPU, with as many devices as there are ranks."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": EPOCHS}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(**(quiet | {"devices": ranks(), "strategy": strategy()} | options))


def fit(module: pl.LightningModule, ckpt_path: Path | None = None, data: Any = None, **options: Any) -> pl.Trainer:
    """Train a module, and return the Trainer."""
    run = trainer(**options)
    loaders = data if isinstance(data, dict) else {"train_dataloaders": loader() if data is None else data}
    run.fit(module, **loaders, ckpt_path=None if ckpt_path is None else str(ckpt_path))
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
    r'.fit\(ckpt_path="last"\) is set, but there is no last checkpoint',
    r"`.fit\(ckpt_path=None\)` was called without a model",
    r"AdaScale's gain is meant for SGD",
    r"torch.distributed.nn.functional.all_gather is deprecated",  # which Lightning calls
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning with torch 2.15
    r"Checkpoint directory .* exists and is not empty",
    r"The number of training batches .* is smaller than the logging interval",
    r"The '(val|train)_dataloader' does not have many workers",
    r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided",
)


class Recorder(pl.Callback):
    """Keeps what callbacks see: the length of each epoch, and of each update its numbers and its loss."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.updates: list[tuple[int, int, int, bool]] = []  # (global step, epoch, batch_idx, last of the epoch)
        self.losses: list[float] = []
        self.epoch_losses: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(trainer.num_training_batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.updates.append((trainer.global_step, trainer.current_epoch, batch_idx, trainer.is_last_batch))
        self.losses.append(float(trainer.callback_metrics["loss_step"]))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epoch_losses.append(float(trainer.callback_metrics.get("loss_epoch", math.nan)))


EXPECTED_UPDATES = [
    (first + index + 1, epoch, index, first + index + 1 == end)
    for epoch, (first, end) in enumerate(zip((0, *ENDS), ENDS, strict=False))
    for index in range(end - first)
]


def check_records(records: Recorder, *, schedule: bool = False, clip: bool = False) -> None:
    """Check what callbacks saw against a training by hand with SGD."""
    model = network()
    inner = inner_of("SGD", model)
    norm = MAX_GRAD_NORM if clip else None
    scheduler = StepLR(inner, 7, 0.5) if schedule else None
    losses = by_hand(model, inner, max_grad_norm=norm, scheduler=scheduler)
    assert records.epochs == [11, 10, 5]
    assert records.updates == EXPECTED_UPDATES
    np.testing.assert_allclose(records.losses, losses, rtol=1e-12)
    sizes = true_sizes()
    means = [
        np.average(losses[first:end], weights=sizes[first:end]) for first, end in zip((0, *ENDS), ENDS, strict=False)
    ]
    np.testing.assert_allclose(records.epoch_losses, means, rtol=1e-12)


def true_sizes() -> list[int]:
    """The batch size of each update: that of the trace, shortened at the end of each epoch."""
    return [len(batch) for _, batch in zip(range(UPDATES), batches(SIZES, SAMPLES, 0), strict=False)]


def adaptive_trace() -> vbs.AdaptiveTrace:
    """A trace whose epochs turn out longer and shorter than they were estimated."""
    return vbs.AdaptiveTrace(_chosen, start=24, every=3, delay=4)


def _chosen(known: Any) -> int:
    return [24, 61, 9, 13, 40][known.updates // 3 % 5]


def check_adaptive(module: Classifier, run: pl.Trainer) -> None:
    """Check a training with the adaptive trace against one by hand with the batch sizes that were chosen."""
    first: Any = run.optimizers[0]
    sizes = [first.sampler.trace.batch_size(step) for step in range(first.updates)]
    assert len({*sizes}) > 3
    assert (run.global_step, run.current_epoch, first.samples) == (first.updates, EPOCHS, EPOCHS * SAMPLES)
    twin = network()
    by_hand(twin, inner_of("SGD", twin), sizes=sizes, updates=first.updates)
    assert difference(module.net, weights(twin)) < 1e-12


# Jobs of several processes. ------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[type[Classifier], Any]] = {"ddp": (Classifier, strategy), "fsdp2": (Sharded, sharded)}


def yardstick_job(kind: str) -> None:
    """Trainings of the yardstick, automatic and manual, and what their callbacks see."""
    create, plan = KINDS[kind]
    for optimizer in ("SGD", "AdamW"):
        records, module = Recorder(), create(optimizer, schedule=True)
        run = fit(module, gradient_clip_val=MAX_GRAD_NORM, callbacks=[records], strategy=plan())
        assert (run.global_step, run.current_epoch, module.estimate) == (UPDATES, EPOCHS, UPDATES)
        assert difference(module.net, expected(optimizer, schedule=True, clip=True)) < 1e-12
        if optimizer == "SGD":
            check_records(records, schedule=True, clip=True)
    summing: Any = run.strategy.optimizers[0]  # type: ignore[attr-defined]
    assert type(summing._updater.gradient.sum).__name__ == {"ddp": "DDP", "fsdp2": "Sharded"}[kind]
    assert isinstance(module.net[0].weight, DTensor) == (kind == "fsdp2")
    module = create()
    fit(module, strategy=plan("adascale"))
    assert difference(module.net, expected(rule="adascale")) < 1e-12
    records, module = Recorder(), create(manual=True, schedule=True)
    fit(module, callbacks=[records], strategy=plan())
    assert difference(module.net, expected(schedule=True)) < 1e-12
    check_records(records, schedule=True)
    module = create()
    check_adaptive(module, fit(module, strategy=plan(trace=adaptive_trace())))


def save_job(folder: Path, name: str, kind: str = "ddp", **options: Any) -> None:
    """A training that saves after every update; `name` has "dropout", or there is none."""
    torch.manual_seed(3 + (dist.get_rank() if dist.is_initialized() else 0))
    create, plan = KINDS[kind]
    module = create(dropout=0.5 if "dropout" in name else 0.0)
    fit(module, callbacks=[saver(folder / name)], enable_checkpointing=True, strategy=plan(**options))
    found = whole(module.net)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(found, folder / name / "weights.pt")


def resume_job(folder: Path, name: str, stops: Sequence[int], tolerance: float, kind: str = "ddp") -> None:
    """Trainings that resume after updates of `save_job`."""
    create, plan = KINDS[kind]
    for stop in stops:
        torch.manual_seed(100)
        module = create(dropout=0.5 if "dropout" in name else 0.0)
        run = fit(module, saved(folder / name, stop), strategy=plan())
        assert (run.global_step, run.current_epoch) == (UPDATES, EPOCHS), stop
        found = difference(module.net, torch.load(folder / name / "weights.pt"))
        assert found <= tolerance, (name, stop, found)


class Single(Classifier):
    """In float32."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net.float()

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0].float()).float(), batch[1])


class SingleSharded(Single, Sharded):
    """The same, sharded."""


def scaled(**options: Any) -> list[MixedPrecision]:
    """The plugin of float16 on a CPU."""
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))]


def float16_job() -> None:
    """float16 with a scaler: the sum in backward() knows the scale."""
    for module, plan in (Single(), strategy()), (SingleSharded(), sharded()):
        fit(module, plugins=scaled(init_scale=2.0**12), strategy=plan)
        assert difference(module.net, expected().float()) < 1e-3


class Talking(Classifier):
    """A module that communicates in `training_step`, of which every process computes equally many."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        own: Any = self.trainer.strategy
        own.barrier()
        assert own.broadcast(loss.item()) > 0
        assert self.all_gather(loss.detach()).shape == (ranks(),)
        assert own.reduce(loss.detach().clone()) > 0
        return loss


def several_job() -> None:
    """What matters only on several processes."""
    talking = Talking()
    fit(talking, strategy=strategy(trace="0:24 3:1 9:37"))  # a rank has only a replay of an update of one sample
    unequal = Classifier()
    with torch.no_grad():
        unequal.net[0].weight += dist.get_rank()
    fit(unequal)  # begins with the weights of rank 0
    assert difference(unequal.net, expected()) < 1e-12
    validated = Validated()
    fit(validated, data={"train_dataloaders": loader(shuffle=False), "val_dataloaders": loader(shuffle=False)})
    assert len(validated.rows) == 3 * 13  # each rank reads half of the 26 batches
    own: Any = validated.trainer.strategy
    assert not own.optimizers[0].sampler.shuffle  # as the loader says, on several processes too


class Validated(Classifier):
    """A module with a validation, which keeps the number of rows of each batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.rows.append(len(batch[0]))
        self.log("val_loss", self.loss(batch), sync_dist=True)
