"""transformers' Trainer with a variable batch size, against one whole batch an update by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer

import variable_batch_size as vbs
from helpers.transformers_jobs import (
    EPS,
    LR,
    Classifier,
    Rows,
    SavesAt,
    arguments,
    growing,
    trainer_of,
)
from helpers.yardstick import (
    ENDS,
    MAX_GRAD_NORM,
    MICROBATCH,
    REF,
    SAMPLES,
    SIZES,
    STOPS,
    TRACE,
    UPDATES,
    by_hand,
    difference,
    network,
    weights,
)

EXACT = 1e-12


def adamw(model: Any) -> AdamW:
    """The optimizer that Trainer makes by default, without weight decay."""
    return AdamW(model.parameters(), lr=LR, weight_decay=0.0, eps=EPS)


@pytest.mark.parametrize(
    ("rule", "kind", "schedule"),
    [("root", "adamw", "linear"), ("linear", "sgd", "constant"), ("adascale", "sgd", "linear")],
)
def test_it_makes_the_updates_of_whole_batches(tmp_path: Path, rule: str, kind: str, schedule: str) -> None:
    model, twin = Classifier(), network()
    inner = SGD(model.parameters(), lr=LR, momentum=0.9) if kind == "sgd" else None
    trainer = trainer_of(
        tmp_path, model, rule=rule, lr_scheduler_type=schedule, warmup_steps=4, options={"optimizers": (inner, None)}
    )
    result = trainer.train()
    twin_inner = SGD(twin.parameters(), lr=LR, momentum=0.9) if kind == "sgd" else adamw(twin)

    def factor(step: int) -> float:
        return 1.0 if schedule == "constant" else min(step / 4, (UPDATES - step) / (UPDATES - 4))

    scheduler = LambdaLR(twin_inner, factor)
    losses = by_hand(twin, twin_inner, rule=rule, max_grad_norm=MAX_GRAD_NORM, scheduler=scheduler)
    assert difference(model.net, weights(twin)) < EXACT
    logs = trainer.state.log_history
    assert [entry["loss"] for entry in logs[:-1]] == pytest.approx(losses, rel=1e-6)  # Trainer adds them in float32
    assert result.training_loss == pytest.approx(sum(losses) / UPDATES, rel=1e-6)
    assert trainer.variable_optimizer.updates == trainer.state.global_step == trainer.state.max_steps == UPDATES
    assert trainer.lr_scheduler.last_epoch == UPDATES


def test_what_it_logs(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, rule="adamscale", lr_scheduler_type="linear")
    trainer.train()
    logs = trainer.state.log_history
    steps, end = logs[:-1], logs[-1]
    batch_sizes, samples = [entry["batch_size"] for entry in steps], [entry["samples"] for entry in steps]
    assert len(steps) == UPDATES
    assert sum(batch_sizes) == samples[-1] == 3 * SAMPLES
    assert batch_sizes[:11] == [*SIZES[:10], SAMPLES - sum(SIZES[:10])]
    assert [entry["epoch"] for entry in steps] == pytest.approx([number / SAMPLES for number in samples])
    assert [steps[end - 1]["epoch"] for end in ENDS] == [1.0, 2.0, 3.0]
    assert all(entry["grad_norm"] > 0 for entry in steps)
    assert {"noise_scale"} <= steps[-1].keys()
    gain = steps[-1]["learning_rate"] / (LR / UPDATES)  # the schedule has one step left
    assert steps[-1]["batch_size"] == 3
    assert 0 < gain < 1
    assert end["train_samples_per_second"] == pytest.approx(3 * SAMPLES / end["train_runtime"], rel=0.01)
    assert "noise_scale" not in one_step(tmp_path, rule="root")
    assert one_step(tmp_path, rule="root", max_steps=1)["learning_rate"] == pytest.approx(LR * math.sqrt(24 / REF))


def one_step(folder: Path, **options: Any) -> dict[str, Any]:
    """What is logged of the first update."""
    trainer = trainer_of(folder, **{"max_steps": 1, **options})
    trainer.train()
    return trainer.state.log_history[0]


RESUMED = {"rule": "adamscale", "lr_scheduler_type": "cosine"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a training with dropout that has saved after each update, and its weights at the end."""
    folder, model = tmp_path_factory.mktemp("whole"), Classifier(dropout=0.5)
    trainer_of(folder, model, **RESUMED, options={"callbacks": [SavesAt()]}).train()
    return folder, weights(model)


@pytest.mark.parametrize("stop", STOPS)
def test_a_training_resumes_after_any_update(tmp_path: Path, whole: tuple[Path, Any], stop: int) -> None:
    """The same with dropout, and with a schedule, to the last bit."""
    (folder, expected), resumed = whole, Classifier(dropout=0.5)
    trainer = trainer_of(tmp_path, resumed, **RESUMED, options={"callbacks": [SavesAt()]})
    torch.manual_seed(99)  # a training that resumes begins with other random numbers
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{stop}"))
    assert torch.equal(weights(resumed), expected)
    assert trainer.state.global_step == UPDATES
    assert trainer.state.epoch == 3
    assert [entry["step"] for entry in trainer.state.log_history] == [*range(1, UPDATES + 1), UPDATES]
    assert len(list(tmp_path.glob("checkpoint-*"))) == sum(other > stop for other in STOPS)


def test_a_finished_training_resumes_to_nothing(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, save_strategy="steps", save_steps=13)
    first.train()
    model = Classifier()
    again = trainer_of(tmp_path, model)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == again.variable_optimizer.updates == UPDATES
    assert difference(model, weights(first.model)) == 0
    more = trainer_of(tmp_path, model, num_train_epochs=4)  # and one that is longer continues
    more.train(resume_from_checkpoint=True)
    assert more.state.epoch == 4
    assert more.variable_optimizer.samples == 4 * SAMPLES


def test_a_second_train_is_a_new_training(tmp_path: Path) -> None:
    """Of the weights as they are, as Trainer does; it used to end after 15 of 26 updates."""
    model, twin = Classifier(), network()
    trainer = trainer_of(tmp_path, model, rule="linear", options={"optimizers": (SGD(model.parameters(), LR), None)})
    for _ in range(2):
        trainer.train()
        assert trainer.state.global_step == trainer.variable_optimizer.updates == UPDATES
        by_hand(twin, SGD(twin.parameters(), LR), rule="linear", max_grad_norm=MAX_GRAD_NORM)
        assert difference(model.net, weights(twin)) < EXACT


# A batch size that a controller chooses. ------------------------------------------------------------------------------


class BySamples:
    """The schedule that counts updates at the reference: LambdaLR, stepped to floor(samples / REF)."""

    def __init__(self, inner: Any, sizes: list[int], total: int) -> None:
        self.inner, self.sizes, self.total, self.samples = inner, list(sizes), total, 0

    def step(self) -> None:
        self.samples += self.sizes.pop(0)
        for group in self.inner.param_groups:
            group["lr"] = LR * (1 - min(self.samples // REF, self.total) / self.total)


def test_an_adaptive_trace_trains_all_epochs_and_its_schedule_goes_by_samples(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 7}
    model, twin = Classifier(), network()
    trainer = trainer_of(tmp_path, model, trace=growing(), lr_scheduler_type="linear", **saves)
    trainer.train()
    optimizer = trainer.variable_optimizer
    sizes = [entry["batch_size"] for entry in trainer.state.log_history[:-1]]
    assert len(set(sizes)) > 5
    assert trainer.state.global_step == trainer.state.max_steps == optimizer.updates == len(sizes)
    assert optimizer.samples == sum(sizes) == 3 * SAMPLES
    assert trainer.state.epoch == 3
    inner, total = adamw(twin), math.ceil(3 * SAMPLES / REF)
    scheduler = BySamples(inner, sizes, total)
    by_hand(twin, inner, max_grad_norm=MAX_GRAD_NORM, scheduler=scheduler, sizes=sizes * 2, updates=len(sizes))
    assert difference(model.net, weights(twin)) < EXACT
    for stop in 7, 21:
        resumed = Classifier()
        again = trainer_of(tmp_path / "again", resumed, trace=growing(), lr_scheduler_type="linear")
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
        assert difference(resumed, weights(model)) == 0
        assert again.state.max_steps == len(sizes)


def test_an_adaptive_trace_with_max_steps_ends_there(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, trace=growing(), max_steps=40, lr_scheduler_type="linear")
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == 40
    assert trainer.variable_optimizer.samples > 3 * SAMPLES
    assert trainer.lr_scheduler.get_last_lr() == [0.0, 0.0]


def test_what_trainer_does_without_it(tmp_path: Path) -> None:
    """The sampler and the optimizer in a plain Trainer: its clipping of parts raises; without, updates are missing."""
    sizes = []
    for max_grad_norm in MAX_GRAD_NORM, 0.0:
        data, model = Rows(), Classifier()
        sampler = vbs.CustomSampler(data, TRACE, 1, 0, MICROBATCH, fixed_shape=False)
        optimizer = vbs.RootRuleOptimizer(adamw(model), sampler, REF)
        loader = DataLoader(data, batch_sampler=sampler)

        class Naive(Trainer):
            def get_train_dataloader(self, loader: Any = loader) -> Any:
                return loader

        own = arguments(tmp_path, max_grad_norm=max_grad_norm)
        trainer = Naive(model, own, train_dataset=data, optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)))
        with pytest.raises(RuntimeError, match="only backward"):
            trainer.train()
        sizes.append(optimizer.updates)
    assert sizes == [0, 0]
