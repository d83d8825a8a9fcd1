"""What users of Lightning write every day, and what it is with a batch that is an update."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.tuner import Tuner
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader

from helpers.lightning_jobs import (
    ALLOWED,
    Classifier,
    Recorder,
    Validated,
    difference,
    expected,
    fit,
    loader,
    strategy,
    trainer,
)
from helpers.yardstick import SAMPLES, UPDATES, Samples

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in ALLOWED]


@pytest.mark.filterwarnings("ignore:The lr scheduler dict contains")
def test_reduce_lr_on_plateau_with_manual_optimization() -> None:
    class Plateau(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            scheduler = self.lr_schedulers()
            assert scheduler is self.scheduler
            if isinstance(scheduler, ReduceLROnPlateau):  # as Lightning's page has it
                scheduler.step(1.0)

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.net.parameters(), lr=0.1)
            self.scheduler = ReduceLROnPlateau(optimizer, patience=4, factor=0.5)
            return [optimizer], [self.scheduler]

    module = Plateau(manual=True)
    fit(module)
    assert module.scheduler.last_epoch == UPDATES
    assert module.scheduler.get_last_lr() == [0.1 * 0.5**5]  # after updates 6, 11, 16, 21 and 26
    assert "step" not in module.scheduler.state_dict()


def test_a_schedule_that_counts_batches_is_told() -> None:
    class Cycle(Classifier):
        steps = len(loader())

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.net.parameters(), lr=0.1)
            scheduler = OneCycleLR(optimizer, 0.1, epochs=3, steps_per_epoch=self.steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    with pytest.warns(UserWarning, match="total_steps=78 is the number of batches of 3 epochs .* makes 26 steps"):
        fit(Cycle(), max_epochs=3)


class Tuned(Classifier):
    """A module that makes its dataset whenever it is asked, as most tutorials do."""

    lr = 0.1

    def configure_optimizers(self) -> Any:
        return SGD(self.net.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=8, shuffle=True)


def test_the_learning_rate_finder_with_a_dataset_that_is_made_anew() -> None:
    run = trainer(enable_checkpointing=False)
    found = Tuner(run).lr_find(Tuned(), num_training=20, update_attr=False)
    assert found is not None
    assert len(found.results["lr"]) >= 20
    assert run.global_step == 0
    module = Tuned()
    ended = trainer(enable_checkpointing=False, callbacks=[callbacks.LearningRateFinder(num_training_steps=20)])
    ended.fit(module)
    assert (ended.global_step, ended.strategy.samples) == (UPDATES, 3 * SAMPLES)  # type: ignore[attr-defined]


def test_loaders_that_are_made_anew_in_each_epoch() -> None:
    module = Classifier()
    module.train_dataloader = loader  # type: ignore[method-assign]
    run = trainer(reload_dataloaders_every_n_epochs=1)
    run.fit(module)
    assert difference(module.net, expected()) < 1e-12


@pytest.mark.skipif(TorchVersion(pl.__version__) < "2.6", reason="Lightning has them since 2.6")
def test_validations_by_time() -> None:
    module = Validated()
    data = {"train_dataloaders": loader(), "val_dataloaders": loader(shuffle=False, batch_size=50)}
    run = fit(module, data=data, val_check_interval=timedelta(microseconds=1), check_val_every_n_epoch=None)
    assert run.global_step == UPDATES
    assert len(module.rows) >= 5 * UPDATES  # after every update


@pytest.mark.filterwarnings("ignore:no checkpoint is written of the update")
@pytest.mark.parametrize(
    "kind", ["OnExceptionCheckpoint", *(["ModelCheckpoint"] if TorchVersion(pl.__version__) >= "2.6" else [])]
)
def test_an_exception_in_a_hook_before_the_step_is_not_hidden(kind: str, tmp_path: Path) -> None:
    class Failing(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == 5:
                raise KeyError("on purpose")

    options = {"save_on_exception": True} if kind == "ModelCheckpoint" else {}
    keeper = getattr(callbacks, kind)(tmp_path, **options)
    with pytest.raises(KeyError, match="on purpose"):
        fit(Failing(), callbacks=[keeper], enable_checkpointing=True)


def test_the_batch_of_callbacks_has_the_rows_of_the_update(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looking(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            x, target = batch
            assert isinstance(batch, list)
            seen.append((len(batch), batch[0].size(0), len(x), len(target)))
            pl_module.log("rows", float(len(x)), on_step=False, on_epoch=True)

    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=5)
    logger = CSVLogger(tmp_path)
    options: dict[str, Any] = {
        "logger": logger,
        "log_every_n_steps": 1,
        "max_steps": 10,
        "strategy": strategy(trace=16),
    }
    module = Classifier()
    module.flops_per_batch = 1  # type: ignore[assignment]
    run = fit(module, callbacks=[monitor, Looking()], data=loader(batch_size=5), **options)
    assert seen == [(2, 16, 16, 16)] * 10
    assert float(run.logged_metrics["train/samples"]) == 160
    assert float(run.callback_metrics["rows"]) == 16


@pytest.mark.parametrize(
    "collate", [lambda rows: {"x": torch.stack([x for x, _ in rows]), "y": [int(y) for _, y in rows]}, list]
)
def test_batches_of_other_kinds(collate: Any) -> None:
    seen: list[Any] = []

    class Looking(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append((isinstance(batch, dict), len(batch["x"] if isinstance(batch, dict) else batch)))

    class Reading(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if isinstance(batch, list):
                batch = torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])
            else:
                batch = batch["x"], torch.tensor(batch["y"])
            return super().training_step(batch, batch_idx)

    module = Reading()
    fit(module, data=loader(collate_fn=collate), callbacks=[Looking()])
    assert seen[:4] == [(collate is not list, size) for size in (24, 24, 24, 10)]
    assert difference(module.net, expected()) < 1e-12


# The private names of Lightning: what breaks without them, beside what the other tests say. --------------------------


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_configure_launcher`: otherwise one process in a notebook is refused."""
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    assert fit(Classifier(), max_steps=1).global_step == 1


def test_one_process_may_leave_parameters_unused() -> None:
    """`_setup_model`: otherwise DistributedDataParallel needs a process group, and all gradients."""

    class Unused(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Linear(1, 1)

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1, momentum=0.9)

    module = Unused()
    run = fit(module)
    assert difference(module.net, expected()) < 1e-12
    assert not torch.distributed.is_initialized()
    run.validate(Validated(), loader(shuffle=False), verbose=False)


def test_lightning_knows_the_last_update_of_epochs_that_differ() -> None:
    """`_data_fetcher`: otherwise all epochs have the length of the first one."""
    module = Validated()
    lengths = []

    class Looking(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            lengths.append((trainer.num_training_batches, trainer.is_last_batch))

    data = {"train_dataloaders": loader(), "val_dataloaders": loader(shuffle=False, batch_size=50)}
    trace = "0:50 5:10 26:50"  # epochs of 5, 21 and 5 updates
    fit(module, data=data, callbacks=[Looking()], strategy=strategy(trace=trace), val_check_interval=1.0)
    assert [length for length, last in lengths if last] == [5, 21, 5]
    assert len(module.rows) == 3 * 5


class Outputs(Recorder):
    """Keeps the loss that callbacks get."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.outputs.append(float(outputs["loss"]))


def test_the_loss_of_outputs_is_that_of_the_update() -> None:
    """The learning rate finder, among others, reads it."""
    records = Outputs()
    fit(Classifier(), callbacks=[records])
    assert records.outputs == pytest.approx(records.losses, rel=1e-12)


class Ragged(Classifier):
    """A module whose microbatches are padded to their longest rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, target, lengths = batch
        assert x.shape[1] == int(lengths.max())
        return super().training_step((x.sum(1), target), batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rows, target, _ = batch
        assert len(rows) == len(target) > 0
        self.log("x", 1.0, on_epoch=True, batch_size=len(target))


def padded(rows: list[Any]) -> Any:
    """Repeat the rows up to the longest one, whose length is their class."""
    lengths = torch.tensor([1 + int(target) for _, target in rows])
    x = torch.zeros(len(rows), int(lengths.max()), 6, dtype=torch.float64)
    x[:, 0] = torch.stack([x for x, _ in rows])
    return x, torch.stack([target for _, target in rows]), lengths


def test_rows_of_unequal_shapes_are_a_list() -> None:
    fit(module := Ragged(), data=loader(collate_fn=padded))
    assert difference(module.net, expected()) < 1e-12


class OfTensors(Classifier):
    """A module whose batches are tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch[:, :6], batch[:, 6].long()), batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.cat([batch, batch * 2]).shape[0] == 2 * len(batch)


def test_a_batch_that_is_a_tensor_is_one_in_hooks() -> None:
    def joined(rows: list[Any]) -> Any:
        return torch.stack([torch.cat([x, target.double()[None]]) for x, target in rows])

    fit(module := OfTensors(), data=loader(collate_fn=joined))
    assert difference(module.net, expected()) < 1e-12
