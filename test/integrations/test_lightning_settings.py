"""What else of Lightning works with a trace."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from helpers.lightning_jobs import (
    ALLOWED,
    Classifier,
    Single,
    Validated,
    difference,
    expected,
    fit,
    inner_of,
    loader,
    saved,
    saver,
    scaled,
)
from helpers.yardstick import (
    EPOCHS,
    REF,
    SAMPLES,
    UPDATES,
    Samples,
    by_hand,
    network,
    samples,
    weights,
)
from variable_batch_size.integrations.lightning import VariableBatchStrategy

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in ALLOWED]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(shuffle=False)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_hugging_face_datasets_and_stateful_loaders(kind: Any, tmp_path: Path) -> None:
    x, target = samples()
    rows = datasets.Dataset.from_dict({"x": x.tolist(), "target": target.tolist()}).with_format("torch", dtype=x.dtype)
    rows = rows.with_format("numpy")

    class Named(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch["x"].double(), batch["target"]), batch_idx)

    data = kind(rows, batch_size=8, shuffle=True)
    module = Named()
    fit(module, data=data, callbacks=[saver(tmp_path)], enable_checkpointing=True)
    assert difference(module.net, expected()) < 1e-6  # the dataset holds float32
    again = Named()
    fit(again, saved(tmp_path, 14), data=kind(rows, batch_size=8, shuffle=True))
    assert difference(again.net, weights(module.net)) == 0.0


def test_a_data_module_and_early_stopping() -> None:
    module = Validated()
    stopper = EarlyStopping("val_loss", patience=0, min_delta=1e9)
    run = fit(module, data={"datamodule": Data()}, callbacks=[stopper], max_epochs=9)
    assert (run.global_step, run.current_epoch) == (21, 2)  # the second validation is not better by so much
    assert run.validate(module, datamodule=Data(), verbose=False)[0]["val_loss"] > 0
    assert len(module.rows) == 3 * 26


def test_workers_and_a_subset() -> None:
    module, twin = Classifier(), network()
    first: Any = Subset(Samples(), range(SAMPLES))
    pl.seed_everything(7, workers=True, verbose=False)
    fit(module, data=DataLoader(first, 8, shuffle=True, num_workers=1, persistent_workers=True))
    by_hand(twin, inner_of("SGD", twin), seed=7)  # that of seed_everything
    assert difference(module.net, weights(twin)) < 1e-12


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "PL_GLOBAL_SEED", "PL_SEED_WORKERS":
        monkeypatch.setenv(name, "0")  # so that they are restored


def test_mixed_precision() -> None:
    bf16 = Single()
    run = fit(bf16, precision="bf16-mixed")
    assert (run.global_step, bf16.net[0].weight.dtype) == (UPDATES, torch.float32)
    assert difference(bf16.net, expected().float()) < 0.1
    fp16, plugins = Single(), scaled(init_scale=2.0**40, growth_interval=5)
    run = fit(fp16, plugins=plugins, gradient_clip_val=0.5)
    assert run.global_step == UPDATES  # also the first ones, which the scaler skips
    assert plugins[0].scaler.get_scale() < 2.0**40
    assert torch.isfinite(weights(fp16.net)).all()


def test_float16_saves_its_scale(tmp_path: Path) -> None:
    options = {"init_scale": 2.0**12, "growth_interval": 5}
    module = Single()
    fit(module, plugins=scaled(**options), callbacks=[saver(tmp_path)], enable_checkpointing=True)
    again = Single()
    fit(again, saved(tmp_path, 14), plugins=scaled(**options))
    assert difference(again.net, weights(module.net)) == 0.0


class Two(pl.LightningModule):
    """Two networks with an optimizer each, as in a GAN: both backwards come before both steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(), network()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, target = batch
        optimizers: Any = self.optimizers()
        for net in self.first, self.second:
            self.manual_backward(torch.nn.functional.cross_entropy(net(x), target))
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        schedulers: Any = self.lr_schedulers()
        for scheduler in schedulers:
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [SGD(self.first.parameters(), lr=0.1, momentum=0.9), inner_of("AdamW", self.second)]
        return optimizers, [StepLR(optimizer, 7, 0.5) for optimizer in optimizers]


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_two_optimizers(tmp_path: Path) -> None:
    module = Two()
    run = fit(module, callbacks=[saver(tmp_path)], enable_checkpointing=True)
    assert run.global_step == 2 * UPDATES  # Lightning counts the steps of both
    assert difference(module.first, expected("SGD", schedule=True)) < 1e-12
    assert difference(module.second, expected("AdamW", schedule=True)) < 1e-12
    again = Two()
    fit(again, saved(tmp_path, 28))
    assert difference(again, weights(module)) == 0.0


class FineTuned(Classifier):
    """A module whose first layer is frozen in the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.net[0], self.net[1:]

    def configure_optimizers(self) -> Any:
        return SGD(self.head.parameters(), lr=0.1, momentum=0.9)


class Unfreezing(BackboneFinetuning):
    """Trains the backbone from the second epoch on, also after a resume, which Lightning's own class does not."""

    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, lambda_func=lambda _: 1.0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch >= self.unfreeze_backbone_at_epoch:
            self.make_trainable(pl_module.backbone)


def test_a_resumed_fine_tuning(tmp_path: Path) -> None:
    module = FineTuned()
    fit(module, callbacks=[Unfreezing(), saver(tmp_path)], enable_checkpointing=True)
    for stop in 7, 14, 21:  # the backbone is trained from update 11 on
        again = FineTuned()
        run = fit(again, saved(tmp_path, stop), callbacks=[Unfreezing()])
        assert len(run.optimizers[0].param_groups) == 2
        assert difference(again.net, weights(module.net)) == 0.0


def test_a_closure_and_a_user_hook() -> None:
    class Manual(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()

            def closure() -> None:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))

            optimizer.step(closure=closure)

    class Warming(Classifier):
        calls = 0

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            self.calls += 1
            optimizer.step(closure=optimizer_closure)

    manual, warming = Manual(manual=True), Warming()
    assert fit(manual).global_step == UPDATES
    fit(warming)
    assert warming.calls == UPDATES
    assert difference(manual.net, expected()) < 1e-12
    assert difference(warming.net, expected()) < 1e-12


def test_a_schedule_by_samples_and_a_compiled_network() -> None:
    sizes = [24] * 3 + [10] * 6 + [37] + [0] * 16

    class BySamples(Classifier):
        def configure_optimizers(self) -> Any:
            own: Any = self.trainer.strategy
            optimizer = inner_of("SGD", self.net)
            decay = LambdaLR(optimizer, lambda _: 1 - own.samples / (EPOCHS * SAMPLES))
            return [optimizer], [{"scheduler": decay, "interval": "step"}]

    module, twin = BySamples(), network()
    module.net.compile(backend="eager")
    run = fit(module, max_steps=10)
    inner = inner_of("SGD", twin)
    decay = LambdaLR(inner, lambda update: 1 - sum(sizes[:update]) / (EPOCHS * SAMPLES))
    by_hand(twin, inner, scheduler=decay, updates=10)
    assert run.global_step == 10
    assert difference(module.net, weights(twin)) < 1e-12


def test_settings_are_kept() -> None:
    own = VariableBatchStrategy(8, "linear", REF)
    assert own.settings.ref_batchsize == REF
    with pytest.raises(TypeError, match="sampler_options must be a dict"):
        VariableBatchStrategy(8, sampler_options=3)  # type: ignore[arg-type]
    assert re.fullmatch(r"variable_batch", own.strategy_name)


def test_the_example_runs(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "trainers" / "lightning_classifier.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "updates, accuracy" in line)
    assert line.startswith("139 updates")
    assert float(line.split()[-1]) > 0.9
