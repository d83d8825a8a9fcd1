"""What of Lightning contradicts a trace, and what users are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, StochasticWeightAveraging
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

import variable_batch_size as vbs
from helpers.lightning_jobs import ALLOWED, Classifier, fit, loader, saved, saver, strategy
from helpers.yardstick import EPOCHS, SAMPLES, TRACE, Samples
from variable_batch_size.integrations import supported
from variable_batch_size.integrations.lightning import VariableBatchStrategy
from variable_batch_size.integrations.lightning.supported import SETTINGS

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in ALLOWED]
PAGE = Path(__file__).parents[2] / "docs" / "trainers" / "lightning.md"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(SAMPLES))


class Iterating(Classifier):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        raise AssertionError


class Clipping(Classifier):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError


class Before(Classifier):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        raise AssertionError


class ClippingByHand(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 1e-9, "norm")
        optimizer.step()


class Accumulating(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()


class Normalizing(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.normalization = torch.nn.BatchNorm1d(6)


class Skipping(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Closing(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()


class Leaving(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


class Without(Classifier):
    def configure_optimizers(self) -> Any:
        return None


NOT_SUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("accelerator", {"accelerator": "mps"}, ""),  # which needs one
    ("precision", {"precision": "transformer-engine"}, ""),  # which needs the library
    ("accumulate_grad_batches", {"accumulate_grad_batches": 4}, "be 1, got 4; let the trace"),
    (
        "gradient_clip_algorithm",
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        "got value; leave it out",
    ),
    ("overfit_batches", {"overfit_batches": 2}, "be 0, got 2; pass"),
    ("limit_train_batches", {"limit_train_batches": 1}, "be 1.0, got 1; pass `max_steps`"),
    ("model_averaging_period", {"strategy": strategy(model_averaging_period=3)}, "be left out, got 3; leave it out"),
    ("GradientAccumulationScheduler", {"callbacks": [GradientAccumulationScheduler({0: 2})]}, "Scheduler; let the"),
    ("BatchSizeFinder", {"callbacks": [BatchSizeFinder()]}, "got BatchSizeFinder; pass the rows"),
    (
        "StochasticWeightAveraging",
        {"module": Normalizing(), "callbacks": [StochasticWeightAveraging(0.1)]},
        "of a model without batch normalization, got StochasticWeightAveraging; use",
    ),
    ("configure_gradient_clipping", {"module": Clipping()}, "got that of Clipping; pass `gradient_clip_val`"),
    ("on_before_batch_transfer", {"module": Before()}, "got that of Before; use `collate_fn`"),
    ("dataloader_iter", {"module": Iterating()}, "got True; define"),
]


def test_each_setting_is_in_one_table_and_on_the_page() -> None:
    assert [name in setting.name for (name, *_), setting in zip(NOT_SUPPORTED, SETTINGS, strict=True)] == [True] * 13
    assert supported.table(SETTINGS) in PAGE.read_text()


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize(("name", "options", "message"), [row for row in NOT_SUPPORTED if row[2]])
def test_what_is_not_supported_is_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.* must .*{message}.* \(see docs/trainers/lightning.md\)"):
        fit(**({"module": Classifier()} | options))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"module": ClippingByHand(manual=True)}, r"something else has changed .* clip with max_grad_norm="),
    ({"module": Accumulating(manual=True)}, r"every microbatch of an update must reach optimizer.step\(\)"),
    ({"module": Skipping()}, r"each step\(\) must follow the backward\(\) of one microbatch"),
    ({"module": Closing()}, r"an optimizer_step hook must call optimizer.step\(closure=optimizer_closure\)"),
    ({"module": Leaving()}, r"made 3 updates, the optimizer 3, and 7 of the last epoch are left; .*should_stop"),
    ({"module": Without()}, "parameter"),
    ({"data": DataLoader(Stream(), batch_size=8)}, "the dataset must have an index.*pass a map-style dataset"),
    ({"data": {"train_dataloaders": [loader(), loader()]}}, r"loader must be a DataLoader, got .*\(list\); pass"),
    ({"data": {"train_dataloaders": {"a": loader()}}}, r"loader must be a DataLoader, got .*\(dict\); pass"),
    (
        {"data": DataLoader(Samples(), 8, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))},
        "must read each sample once an epoch.*got .*WeightedRandomSampler.*; leave out sampler=",
    ),
    ({"data": DataLoader(Samples(), 8, sampler=RandomSampler(Samples(), num_samples=7))}, "must read each sample once"),
    ({"data": DataLoader(Samples(), batch_sampler=vbs.CustomSampler(SAMPLES, 8, 1, 0))}, "must have a batch_size"),
    (
        {"strategy": strategy(sampler_options={"minibatch_size": 4})},
        "sampler_options must be .*, got minibatch_size; leave",
    ),
    (
        {"strategy": strategy(optimizer_options={"max_grad_norm": 4.0}), "gradient_clip_val": 1.0},
        "optimizer_options must be .*, got max_grad_norm; leave",
    ),
    ({"strategy": strategy(trace=[24, 24])}, "trace"),
    ({"strategy": strategy(trace=SAMPLES + 1)}, "batch size"),
]


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.")
@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        fit(**({"module": Classifier()} | options))


def test_a_rule_without_its_reference_is_refused_where_it_is_given() -> None:
    with pytest.raises(ValueError, match="needs ref_batchsize"):
        VariableBatchStrategy(TRACE, "root")


def test_a_second_fit_and_a_plain_checkpoint_are_refused(tmp_path: Path) -> None:
    module = Classifier()
    run = fit(module)
    run.fit_loop.max_epochs = 2 * EPOCHS
    with pytest.raises(RuntimeError, match=r"the Trainer has made 26 updates, the optimizer 0, .* create a new"):
        run.fit(module, loader())
    fit(Classifier(), strategy="auto", callbacks=[saver(tmp_path)], enable_checkpointing=True, max_steps=3)
    with pytest.raises(
        ValueError, match=r"ckpt_path must be a checkpoint of VariableBatchStrategy.*, got version None"
    ):
        fit(Classifier(), saved(tmp_path, 3))


def test_a_checkpoint_of_other_samples_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(Classifier(), callbacks=[saver(tmp_path)], enable_checkpointing=True, max_steps=3)
    with pytest.warns(UserWarning, match="Resumed with other settings: rule"):
        fit(Classifier(), saved(tmp_path, 3), strategy=strategy("linear"), max_steps=4)
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    with pytest.raises(ValueError, match=r"seed was 0 and is 7"):
        fit(Classifier(), saved(tmp_path, 3))
