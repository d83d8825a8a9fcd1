"""Lightning's Trainer against the same with `VariableBatchStrategy`, in many settings: see differential_common.

PYTHONPATH=test python benchmarks/differential_lightning.py
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as lc
from lightning.pytorch.loggers import CSVLogger
from torch import optim
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from differential_common import BATCH, ROWS, Outcome, Setting, compare, files
from differential_lightning_modules import (
    ADAMW,
    Classifier,
    Data,
    Hooks,
    Logging,
    Manual,
    NoValidation,
    Recorder,
    Scaled,
    Stream,
    Tuned,
    evaluate,
    gradients,
    loader,
    logged,
    logs,
    metrics,
    named,
    rates,
)
from variable_batch_size.integrations.lightning import VariableBatchStrategy

OWN = "vbs", "zero_grad", "combined_loader"  # what is logged and saved besides, and how often REPEATED ran
METRICS = "a torchmetrics object has on_step the value of the last microbatch"
REDUCED = "a reduce_fx is that of the values of the microbatches, not of the means of batches"
OF_LAST = "what else than the loss is in outputs is that of the last microbatch"
UNMOVED = "the batch of on_train_batch_end is that of the loader, before on_after_batch_transfer"
NONE = "gradients are None after the step: they are complete in on_before_optimizer_step"
CLIPPED = "on_before_optimizer_step runs after clipping"


def fit(
    step: Any = None, of: Callable[..., Any] = Classifier, data: Any = loader, calls: Any = None, resume: str = "",
    callbacks: Callable[[], list[Any]] = list, **options: Any,
) -> Callable[[bool, Path], Outcome]:  # fmt: skip
    """Return a function that trains a module in a setting; other options are those of the Trainer."""

    def train(plain: bool, folder: Path, first: bool = True) -> Outcome:
        pl.seed_everything(1, verbose=False)
        torch.set_num_threads(1)
        if resume and first:
            train(plain, folder, first=False)
        module, recorder = of(step), Recorder()
        own: dict[str, Any] = {} if plain else {"strategy": VariableBatchStrategy(BATCH)}
        quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "devices": 1}
        if not options.get("barebones"):
            own |= {"logger": CSVLogger(folder, name="", version="log"), "log_every_n_steps": 1}
            own |= {"default_root_dir": folder, "callbacks": [*callbacks(), recorder]}
        trainer = pl.Trainer(**{"max_epochs": 3, **quiet, **own, **options, **({} if first else {"max_steps": 19})})
        given = data(plain)
        given = {"datamodule": given} if isinstance(given, pl.LightningDataModule) else {"train_dataloaders": given}
        if "datamodule" not in given and of is not NoValidation:
            given["val_dataloaders"] = loader(True, batch_size=50)
        trainer.fit(module, **given, ckpt_path=str(next(folder.rglob(resume))) if resume and first else None)
        after = calls(trainer, module) if calls else None
        counters = trainer.global_step, trainer.current_epoch, trainer.num_training_batches
        shown = [*map(logged, (trainer.callback_metrics, trainer.progress_bar_metrics, trainer.logged_metrics))]
        return Outcome(module.net.state_dict(), [shown, counters, after], recorder.events + module.events,
                       files(folder, OWN))  # fmt: skip

    return train


def saver(**options: Any) -> Callable[[], list[Any]]:
    """Return a function that returns a ModelCheckpoint."""
    return lambda: [lc.ModelCheckpoint(**options)]


def logged_as(reason: str) -> dict[str, str]:
    """Return that what is logged differs."""
    return dict.fromkeys(("logs", "events", "files"), reason)


def stopper(**options: Any) -> Callable[[], list[Any]]:
    """Return a function that returns an EarlyStopping."""
    return lambda: [lc.EarlyStopping(**options)]


both = {"on_step": True, "on_epoch": True}
SETTINGS = {
    "log on_step and on_epoch": Setting(fit(logs(**both))),
    "log prog_bar without logger": Setting(fit(logs(prog_bar=True, logger=False))),
    "log reduce_fx": Setting(fit(logs(reduce_fx="max", **both)), logged_as(REDUCED)),
    "log_dict of floats": Setting(fit(lambda m, loss: m.log_dict({"a": loss.item(), "b": 2.0}, **both))),
    "torchmetrics on_epoch": Setting(fit(metrics)),
    "torchmetrics on_step": Setting(fit(partial(metrics, on_step=True)), logged_as(METRICS)),
    "log_every_n_steps": Setting(fit(log_every_n_steps=3)),
    "val_check_interval 5": Setting(fit(val_check_interval=5)),
    "val_check_interval 0.5": Setting(fit(val_check_interval=0.5)),
    "val_check_interval over epochs": Setting(fit(val_check_interval=17, check_val_every_n_epoch=None)),
    "check_val_every_n_epoch": Setting(fit(check_val_every_n_epoch=2, num_sanity_val_steps=0)),
    "limit_val_batches, two loaders": Setting(fit(limit_val_batches=2, data=Data, num_sanity_val_steps=-1)),
    "no validation": Setting(fit(of=NoValidation)),
    "max_steps in an epoch": Setting(fit(max_steps=17, max_epochs=-1)),
    "min_steps and EarlyStopping": Setting(fit(min_steps=30, callbacks=stopper(monitor="val_loss", min_delta=9.0))),
    "EarlyStopping by the train loss": Setting(
        fit(logs(**both), callbacks=stopper(monitor="loss_epoch", patience=1, min_delta=9.0), max_epochs=9)
    ),
    "gradient_clip_val": Setting(fit(gradient_clip_val=0.1), {"events": CLIPPED}),
    "bf16-mixed": Setting(fit(of=lambda step: Classifier(step).float(), precision="bf16-mixed"), tolerance=2e-2),
    "64-true, AdamW with groups": Setting(fit(of=partial(Classifier, optimizer=ADAMW), precision="64-true")),
    "StepLR by steps, frequency 2": Setting(fit(of=rates(lrs.StepLR, frequency=2, step_size=3))),
    "ReduceLROnPlateau by epochs": Setting(
        fit(of=rates(lrs.ReduceLROnPlateau, "epoch", monitor="val_loss", patience=0, threshold=9.0))
    ),
    "warm-up and LearningRateMonitor": Setting(
        fit(of=rates(lrs.LambdaLR, lr_lambda=lambda n: min(1, n / 9)), callbacks=lambda: [lc.LearningRateMonitor()])
    ),
    "OneCycleLR": Setting(fit(of=rates(lrs.OneCycleLR, max_lr=0.2, total_steps=39))),
    "ModelCheckpoint by steps": Setting(fit(callbacks=saver(every_n_train_steps=4, save_top_k=-1, save_last=True))),
    "ModelCheckpoint by a metric": Setting(
        fit(callbacks=saver(monitor="val_loss", save_top_k=2, filename="{epoch}-{step}"), max_epochs=4)
    ),
    "resume in an epoch": Setting(
        fit(resume="*=18.ckpt", callbacks=saver(every_n_train_steps=18), data=partial(loader, kind=StatefulDataLoader))
    ),
    "resume at an epoch's end": Setting(fit(resume="*step=13.ckpt", callbacks=saver(save_top_k=-1))),
    "StochasticWeightAveraging": Setting(fit(callbacks=lambda: [lc.StochasticWeightAveraging(0.05, 1)])),
    "EMAWeightAveraging": Setting(fit(callbacks=lambda: [lc.EMAWeightAveraging()])),
    "BackboneFinetuning": Setting(
        fit(of=Tuned, callbacks=lambda: [lc.BackboneFinetuning(1, backbone_initial_lr=0.01)])
    ),
    "frozen parameters": Setting(fit(of=partial(Tuned, frozen=True))),
    "hooks of the module": Setting(fit(of=rates(lrs.StepLR, of=Hooks, step_size=5))),
    "on_after_batch_transfer": Setting(fit(of=Scaled), {"events": UNMOVED}),
    "gradients after the step": Setting(
        fit(callbacks=lambda: [lc.LambdaCallback(on_train_batch_end=gradients)]), logged_as(NONE)
    ),
    "drop_last and workers": Setting(fit(data=partial(loader, drop_last=True, num_workers=1, persistent_workers=True))),
    "batches of dicts": Setting(fit(data=partial(loader, collate_fn=named))),
    "two optimizers by hand": Setting(fit(of=Manual)),
    "fast_dev_run": Setting(fit(fast_dev_run=3)),
    "barebones": Setting(fit(lambda m, loss: None, barebones=True)),
    "deterministic, profiler, anomaly": Setting(fit(deterministic=True, profiler="simple", detect_anomaly=True)),
    "reloaded loaders, evaluations": Setting(fit(calls=evaluate, reload_dataloaders_every_n_epochs=1)),
    "a dict with the loss": Setting(fit(lambda m, loss: {"loss": loss, "n": m.target}), {"events": OF_LAST}),
    "ModelPruning": Setting(fit(callbacks=lambda: [lc.ModelPruning("l1_unstructured", amount=0.2)])),
    "logs of other hooks": Setting(fit(of=Logging)),
    "OnExceptionCheckpoint and Timer": Setting(fit(callbacks=lambda: [lc.OnExceptionCheckpoint("x"), lc.Timer()])),
    "ModelCheckpoint by the train loss": Setting(
        fit(logs(**both), callbacks=saver(monitor="loss_step", every_n_train_steps=3, save_last="link", mode="max"))
    ),
    "LBFGS": Setting(fit(of=partial(Classifier, optimizer=lambda m: optim.LBFGS(m.parameters()))), refused=True),
    "overfit_batches": Setting(fit(overfit_batches=2), refused=True),
    "limit_train_batches": Setting(fit(limit_train_batches=4), refused=True),
    "clipping by value": Setting(fit(gradient_clip_val=0.1, gradient_clip_algorithm="value"), refused=True),
    "accumulation": Setting(fit(callbacks=lambda: [lc.GradientAccumulationScheduler({1: 2})]), refused=True),
    "an iterable dataset": Setting(
        fit(data=lambda plain: DataLoader(Stream(), BATCH if plain else ROWS)), refused=True
    ),
    "no loss": Setting(fit(lambda m, loss: {}), refused=True),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    compare("Lightning", SETTINGS)
