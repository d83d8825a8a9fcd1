"""What of Lightning contradicts a trace, and what users are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

import variable_batch_size as vbs
from helpers.lightning_jobs import (
    ALLOWED,
    Classifier,
    fit,
    loader,
    saved,
    saver,
    strategy,
)
from helpers.yardstick import (
    EPOCHS,
    SAMPLES,
    TRACE,
    Samples,
)
from variable_batch_size.integrations.lightning import VariableBatchStrategy

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in ALLOWED]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(SAMPLES))


@pytest.mark.filterwarnings(
    "ignore:.*has `dataloader_iter`|Found `dataloader_iter`|You are using the `dataloader_iter`"
)
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
        self.clip_gradients(optimizer, 1e9, "norm")
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


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"accumulate_grad_batches": 4},
        "accumulate_grad_batches must be 1, because the trace defines .*, got 4; leave it out",
    ),
    (
        {"callbacks": [GradientAccumulationScheduler({0: 2})]},
        "the trace defines the batch size of an update, got a GradientAccumulationScheduler; leave it out",
    ),
    (
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        'gradients must be clipped by their norm, got .*="value"; pass gradient_clip_algorithm="norm"',
    ),
    ({"limit_train_batches": 0.5}, "an epoch must have all samples of the dataset, got limit_train_batches=0.5; leave"),
    ({"limit_train_batches": 3}, "an epoch must have all samples of the dataset, got limit_train_batches=3; leave"),
    ({"overfit_batches": 2}, "an epoch must have all samples of the dataset, got overfit_batches=2; leave"),
    ({"reload_dataloaders_every_n_epochs": 1}, "the training's loader must stay the same, .* leave it out"),
    ({"sync_batchnorm": True}, "processes must not communicate within a microbatch.*sync_batchnorm=True; leave it out"),
    ({"module": Clipping()}, r"gradients must be clipped when .* remove it, and pass gradient_clip_val to the Trainer"),
    (
        {"module": ClippingByHand(manual=True)},
        r'gradients must be clipped when all .* remove it, and pass optimizer_options=\{"max_grad_norm"',
    ),
    (
        {"module": Accumulating(manual=True)},
        r"training_step must call step\(\) of each optimizer once for each microbatch, .* made 0 updates in one; call",
    ),
    (
        {"module": Normalizing(), "callbacks": [StochasticWeightAveraging(0.1)]},
        "StochasticWeightAveraging adds one without for batch .* use an EMAWeightAveraging",
    ),
    ({"module": Before()}, r"microbatches must reach the device as the loader yields them.* do its work in collate_fn"),
    ({"module": Iterating()}, r"training_step must get a microbatch, got .*; define training_step\(self, batch"),
    ({"module": Skipping()}, "training_step must return a loss for every microbatch"),
    ({"module": Closing()}, r"an optimizer_step hook must call optimizer.step\(closure=optimizer_closure\)"),
    ({"module": Leaving()}, r"an epoch must be trained to its end, but 7 of its updates were left out.*should_stop"),
    ({"data": DataLoader(Stream(), batch_size=8)}, "the dataset must have an index.*pass a map-style dataset"),
    ({"data": [(1, 2)]}, "the training's loader must be a DataLoader of torch, got .* pass one with a batch_size"),
    (
        {"data": {"train_dataloaders": [loader(), loader()]}},
        "there must be one training DataLoader, got a second one; pass it itself, not in a list or dict",
    ),
    (
        {"data": {"train_dataloaders": {"a": loader()}}},
        "there must be one training DataLoader, got a dict; pass it itself, not in a list or dict",
    ),
    ({"data": {"train_dataloaders": [loader()]}}, "there must be one training DataLoader, got a list; pass it itself"),
    (
        {"data": DataLoader(Samples(), 8, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))},
        "must have no sampler of its own.*got WeightedRandomSampler; pass shuffle=True or False instead",
    ),
    (
        {"data": DataLoader(Samples(), 8, sampler=RandomSampler(Samples(), num_samples=7))},
        "must have no sampler of its own",
    ),
    (
        {"data": DataLoader(Samples(), batch_sampler=vbs.CustomSampler(SAMPLES, 8, 1, 0))},
        "must have no batch_sampler of its own.*got CustomSampler; pass batch_size",
    ),
    (
        {"strategy": strategy(sampler_options={"minibatch_size": 4})},
        "sampler_options must be .*, got minibatch_size; leave",
    ),
    (
        {"strategy": strategy(optimizer_options={"max_grad_norm": 4.0}), "gradient_clip_val": 1.0},
        "optimizer_options must be .*, got max_grad_norm; leave",
    ),
    ({"strategy": VariableBatchStrategy(TRACE, "root")}, "ref_batchsize"),
    ({"strategy": strategy(trace=[24, 24])}, "trace"),
    ({"strategy": strategy(trace=SAMPLES + 1)}, "batch size"),
]


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        fit(**({"module": Classifier()} | options))


def test_a_second_fit_and_a_plain_checkpoint_are_refused(tmp_path: Path) -> None:
    module = Classifier()
    run = fit(module)
    run.fit_loop.max_epochs = 2 * EPOCHS
    with pytest.raises(RuntimeError, match=r"the Trainer has made 26 updates and the optimizer 0; create"):
        run.fit(module, loader())
    ended = fit(module, max_steps=14)
    with pytest.raises(RuntimeError, match=r"the Trainer has made 14 updates and the optimizer 0; create"):
        ended.fit(module, loader())  # although nothing is left to train
    fit(Classifier(), strategy="auto", callbacks=[saver(tmp_path)], enable_checkpointing=True, max_steps=3)
    with pytest.raises(ValueError, match="ckpt_path must be a checkpoint of a training with VariableBatchStrategy"):
        fit(Classifier(), saved(tmp_path, 3))


def test_a_checkpoint_of_other_samples_is_refused_in_words_of_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(Classifier(), callbacks=[saver(tmp_path)], enable_checkpointing=True, max_steps=3)
    with pytest.warns(UserWarning, match="Resumed with other settings: rule"):
        fit(Classifier(), saved(tmp_path, 3), strategy=strategy("linear"), max_steps=4)
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    with pytest.raises(
        ValueError, match=r"seed was 0 and is 7.* the seed is that of seed_everything .* leave out ckpt"
    ):
        fit(Classifier(), saved(tmp_path, 3))
