"""The yardstick with Lightning, on one process: weights, counts, logs, resumes; test_lightning_processes.py has two."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import multiclass_f1_score

import variable_batch_size as vbs
from helpers.lightning_jobs import (
    ALLOWED,
    EXPECTED_UPDATES,
    Classifier,
    Recorder,
    Validated,
    adaptive_trace,
    check_adaptive,
    check_records,
    difference,
    expected,
    fit,
    loader,
    resume_job,
    save_job,
    saved,
    saver,
    strategy,
    trainer,
    true_sizes,
)
from helpers.lightning_metrics import Measured
from helpers.yardstick import (
    ENDS,
    EPOCHS,
    MAX_GRAD_NORM,
    REF,
    SAMPLES,
    STOPS,
    UPDATES,
    Samples,
    by_hand,
    mean_loss,
    network,
    weights,
)

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in ALLOWED]


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("rule", ["root", "adascale"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_weights_are_those_of_whole_batches(optimizer: str, rule: str, manual: bool) -> None:
    records, module = Recorder(), Classifier(optimizer, schedule=True, manual=manual)
    clip = {"optimizer_options": {"max_grad_norm": MAX_GRAD_NORM}} if manual else {}
    run = fit(
        module,
        strategy=strategy(rule, **clip),
        gradient_clip_val=None if manual else MAX_GRAD_NORM,
        callbacks=[records],
    )
    assert (run.global_step, run.current_epoch, run.optimizers[0].samples) == (UPDATES, EPOCHS, EPOCHS * SAMPLES)  # type: ignore[attr-defined]
    assert difference(module.net, expected(optimizer, schedule=True, clip=True, rule=rule)) < 1e-12
    assert records.updates == EXPECTED_UPDATES
    if (optimizer, rule) == ("SGD", "root"):
        check_records(records, schedule=True, clip=True)


def test_an_adaptive_trace() -> None:
    records, module = Recorder(), Classifier()
    run = fit(module, strategy=strategy(trace=adaptive_trace()), callbacks=[records])
    check_adaptive(module, run)
    assert [last for *_, last in records.updates].count(True) == EPOCHS  # every epoch has its end


def test_resumes_are_exact(tmp_path: Path) -> None:
    for name in "plain", "dropout":
        save_job(tmp_path, name)
        resume_job(tmp_path, name, STOPS, 0.0)


@pytest.mark.parametrize(
    ("trace", "options"),
    [
        ("0:24 3:10 9:37 12:9 18:50", {}),
        ("0:24 3:10 9:37 12:9 18:50", {"max_steps": 23, "max_epochs": -1}),
        ("0:50 4:24 9:10", {"val_check_interval": 0.5}),
        ("0:50 4:24 9:10", {"val_check_interval": 4, "check_val_every_n_epoch": None}),
    ],
)
def test_resumes_with_validation_repeat_no_update(tmp_path: Path, trace: str, options: dict[str, Any]) -> None:
    data = {"train_dataloaders": loader(), "val_dataloaders": loader(shuffle=False, batch_size=50)}
    torch.manual_seed(1)
    records, module = Recorder(), Validated(dropout=0.5)
    callbacks: list[Any] = [
        records,
        saver(tmp_path),
        type("AfterEpochs", (ModelCheckpoint,), {})(tmp_path / "ends", filename="{step}", save_top_k=-1),
    ]
    run = fit(
        module, data=data, callbacks=callbacks, enable_checkpointing=True, strategy=strategy(trace=trace), **options
    )
    ends = [update for update, *_, last in records.updates if last]
    stops = [saved(tmp_path, stop) for stop in {3, *ends} if stop < run.global_step]
    for path in [*stops, *(tmp_path / "ends").iterdir()]:
        stop = int(path.stem.partition("=")[2])
        if stop == run.global_step:
            continue
        torch.manual_seed(2)
        again, resumed = Recorder(), Validated(dropout=0.5)
        fit(resumed, path, data=data, callbacks=[again], strategy=strategy(trace=trace), **options)
        assert again.updates == [update for update in records.updates if update[0] > stop]
        assert difference(resumed.net, weights(module.net)) == 0.0


def test_a_training_that_max_steps_has_ended_continues_in_its_epoch(tmp_path: Path) -> None:
    part = fit(Classifier(), max_steps=15)
    part.save_checkpoint(tmp_path / "part.ckpt")
    records, module = Recorder(), Classifier()
    run = fit(module, tmp_path / "part.ckpt", callbacks=[records])
    assert records.updates == EXPECTED_UPDATES[15:]
    assert (run.global_step, run.current_epoch) == (UPDATES, EPOCHS)
    assert difference(module.net, expected()) < 1e-12


def test_an_exception_in_an_update_loses_nothing(tmp_path: Path) -> None:
    class Failing(Classifier):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.calls += 1
            if self.calls == 20:  # the second of the three microbatches of update 8
                raise KeyError("on purpose")
            return super().training_step(batch, batch_idx)

    keeper = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(KeyError, match="on purpose"):
        fit(Failing(), callbacks=[keeper], enable_checkpointing=True)
    module = Classifier()
    run = fit(module, Path(keeper.ckpt_path))
    assert run.global_step == UPDATES
    assert difference(module.net, expected()) < 1e-12


def test_numbers_of_updates_are_true_everywhere() -> None:
    found: dict[str, Any] = {}

    class Asking(Classifier):
        def setup(self, stage: str) -> None:
            found["setup"] = self.trainer.estimated_stepping_batches

        def on_train_start(self) -> None:
            found["on_train_start"] = self.trainer.estimated_stepping_batches

    records, module = Recorder(), Asking()
    run = fit(module, callbacks=[records])
    assert found == {"setup": UPDATES, "on_train_start": UPDATES}
    assert (module.estimate, run.estimated_stepping_batches) == (UPDATES, UPDATES)
    assert records.epochs == [11, 10, 5]
    assert isinstance(run, pl.Trainer)
    limited = fit(Asking(), max_steps=13)
    assert (limited.global_step, limited.current_epoch, found["setup"]) == (
        13,
        2,
        13,
    )  # Lightning counts the epoch under way
    assert trainer(max_epochs=-1).estimated_stepping_batches == float("inf")
    unending = Asking()
    fit(unending, max_epochs=0)
    assert found["setup"] == 11  # those of one epoch, as in Lightning
    stopped = fit(Asking(), max_epochs=-1, strategy=strategy(sampler_options={"max_updates": 15}))
    assert (stopped.global_step, found["setup"]) == (15, 15)


def test_logs(tmp_path: Path) -> None:
    module = Classifier(schedule=True)
    logger = CSVLogger(tmp_path, version=0)
    monitor = LearningRateMonitor("step")
    fit(module, logger=logger, callbacks=[monitor], log_every_n_steps=2, gradient_clip_val=MAX_GRAD_NORM)
    rows = np.genfromtxt(tmp_path / "lightning_logs" / "version_0" / "metrics.csv", delimiter=",", names=True)
    by_step = {int(row["step"]): row for row in rows if not np.isnan(row["vbsglobal_batch_size"])}
    sizes, reference = true_sizes(), [0.1 * 0.5 ** (update // 7) for update in range(UPDATES)]
    assert sorted(by_step) == [*range(1, UPDATES, 2)]
    for step, row in by_step.items():
        assert row["vbsglobal_batch_size"] == sizes[step]
        assert row["vbssamples"] == sum(sizes[: step + 1])
        assert row["vbslr_effective"] == pytest.approx(reference[step] * (sizes[step] / REF) ** 0.5, rel=1e-6)
        assert row["vbsgrad_norm"] > 0
    assert list(monitor.lrs) == ["lr-SGD"]  # the reference rate, once, by the name of the user's optimizer
    assert monitor.lrs["lr-SGD"] == [reference[step] for step in range(1, UPDATES, 2)]


def test_hooks_before_the_step_see_the_gradient_of_the_whole_update() -> None:
    class Watching(Classifier):
        steps = 0

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.steps += 1
            self.log("steps", float(self.steps), on_step=True, on_epoch=True)
            if self.steps == 1:
                self.found = [
                    parameter.grad.clone() for parameter in self.net.parameters() if parameter.grad is not None
                ]

        def on_after_backward(self) -> None:
            self.log("backwards", 1.0, reduce_fx="sum", on_step=True, on_epoch=True)

    module, twin, records = Watching(), network(), Recorder()
    run = fit(module, callbacks=[records])
    first: Any = run.optimizers[0]
    indices = first.sampler.batches.order(0)(np.arange(24))
    mean_loss(twin, indices).backward()
    for found, parameter in zip(module.found, twin.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=0)
    assert module.steps == UPDATES
    check_records(records)  # the values of other hooks do not disturb those of training_step
    assert run.callback_metrics["backwards_step"] == 1  # microbatches of the last update, of one sample
    weighed = np.average(range(22, 27), weights=true_sizes()[ENDS[1] :])
    assert float(run.callback_metrics["steps_epoch"]) == pytest.approx(weighed, rel=1e-6)


def test_log_now_and_then_and_after_the_step() -> None:
    class Sparse(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx % 3 == 1:
                self.log("x", batch[0].mean(), on_step=True, on_epoch=True)  # after step(), and not in the first update
            return loss

    module, seen = Sparse(manual=True), []

    class Keeping(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            seen.append(float(trainer.callback_metrics.get("x_step", -1)))

    run = fit(module, callbacks=[Keeping()], max_steps=5)
    first: Any = run.optimizers[0]
    order = first.sampler.batches.order(0)(np.arange(SAMPLES))
    mean = Samples().x[order[24:48]].mean()
    assert seen[0] == -1
    assert seen[1:4] == pytest.approx([float(mean)] * 3, rel=1e-12)
    later = Samples().x[order[82:92]].mean()
    assert seen[4] == pytest.approx(float(later), rel=1e-12)
    epoch = (24 * mean + 10 * later) / 34
    assert float(run.callback_metrics["x_epoch"]) == pytest.approx(float(epoch), rel=1e-12)


def test_log_of_sums_and_extremes() -> None:
    class Counting(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rows = float(len(batch[0]))
            for name, reduction in ("sum", torch.sum), ("max", torch.max), ("min", torch.min):
                self.log(name, rows, reduce_fx=reduction, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    seen: list[tuple[float, ...]] = []

    class Keeping(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(tuple(float(trainer.callback_metrics[f"{name}_step"]) for name in ("sum", "max", "min")))

    fit(Counting(), callbacks=[Keeping()], max_steps=11)
    assert seen[:4] == [(24, 8, 8), (24, 8, 8), (24, 8, 8), (10, 5, 5)]
    assert seen[10] == (34, 7, 6)


def test_metric_objects_are_those_of_the_epoch_and_of_the_last_microbatch() -> None:
    module = Measured()
    run = fit(module, max_epochs=2)
    assert len(module.steps) == 21
    for found, (output, target) in zip(module.steps, module.last, strict=True):
        assert found["f1_step"] == pytest.approx(float(multiclass_f1_score(output, target, num_classes=5)))
        assert found["seen_step"] == len(target)
        assert found["error_step"] == pytest.approx(float((output[:, 0] - target).square().mean()), rel=1e-5)
        assert found["largest_step"] == float(output[:, 0].max())
    output, target = (torch.cat(parts) for parts in zip(*module.updates[ENDS[0] :], strict=True))
    f1 = float(multiclass_f1_score(output, target, num_classes=5))
    assert float(run.callback_metrics["f1_epoch"]) == pytest.approx(f1)
    assert float(run.callback_metrics["seen_epoch"]) == SAMPLES
    assert float(run.callback_metrics["largest_epoch"]) == float(output[:, 0].max())
    pickle.dumps(module.f1)  # nothing is left of it


def test_what_it_is_without_the_strategy() -> None:
    """Naively: the sampler as batch_sampler makes each microbatch an update."""

    class Naive(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    sampler = vbs.CustomSampler(SAMPLES, "0:24 3:10 9:37 12:9 18:50", 1, 0, minibatch_size=8)
    module = Naive()
    run = fit(module, data=DataLoader(Samples(), batch_sampler=sampler), strategy="auto")
    assert run.global_step == 93  # and not 26
    plain = Classifier()
    run = fit(plain, strategy="auto", accumulate_grad_batches=3, gradient_clip_val=MAX_GRAD_NORM)
    assert (run.global_step, plain.estimate) == (27, 27)
    assert difference(module.net, expected()) > 1


def test_a_training_ends_where_the_sampler_ends_it() -> None:
    module, twin = Classifier(), network()
    run = fit(module, strategy=strategy(sampler_options={"max_updates": 13}))
    assert (run.global_step, run.current_epoch) == (13, 2)
    by_hand(twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9), updates=13)
    assert difference(module.net, weights(twin)) < 1e-12
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = fit(Classifier(), fast_dev_run=3)
    assert fast.global_step == 3


def test_checkpoints_from_before_there_was_a_version(tmp_path: Path) -> None:
    save_job(tmp_path, "dropout")
    path = saved(tmp_path / "dropout", 14)
    checkpoint = torch.load(path, weights_only=False)
    own = checkpoint.pop("vbs")
    state = {"vbs": own["optimizers"][0], "host_rng_states": own["host_rng_states"]}
    checkpoint["optimizer_states"][0].update(state)
    torch.save(checkpoint, path)
    resume_job(tmp_path, "dropout", [14], 0.0)
