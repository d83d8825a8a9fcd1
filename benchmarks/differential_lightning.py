"""Does a training of Lightning's Trainer come out the same with `VariableBatchStrategy`, setting by setting?"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks as lc
from lightning.pytorch.loggers import CSVLogger
from torch import optim
from torch.optim import lr_scheduler as lrs
from torchdata.stateful_dataloader import StatefulDataLoader

from differential import Reader, Setting, compare
from helpers.our_order import BATCH, loader, named
from settings_lightning import (
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
    logged,
    logs,
    metrics,
    rates,
)
from variable_batch_size.integrations.lightning import VariableBatchStrategy

OWN = "vbs", "zero_grad", "combined_loader"  # what is logged and saved besides, and how often REPEATED ran
LOGS = "logs", "events", "files"
METRICS = "a torchmetrics object has on_step the value of the last microbatch"
REDUCED = "a reduce_fx is that of the values of the microbatches, not of the means of batches"
OF_LAST = "what else than the loss is in outputs is that of the last microbatch"
UNMOVED = "the batch of on_train_batch_end is that of the loader, before on_after_batch_transfer"
NONE = "gradients are None after the step: they are complete in on_before_optimizer_step"
CLIPPED = "on_before_optimizer_step runs after clipping"


def fit(
    step: Any = None, of: Callable[..., Any] = Classifier, data: Any = loader, calls: Any = None, resume: str = "",
    callbacks: Callable[[], list[Any]] = list, **options: Any,
) -> Setting:  # fmt: skip
    """Return a setting of a module; other options are those of the Trainer."""

    def train(plain: bool, folder: Path, first: bool = True) -> tuple[Any, Any, Any]:
        pl.seed_everything(1, verbose=False)
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
        return module.net.state_dict(), [shown, counters, after], recorder.events + module.events

    return Setting(train)


def saver(**options: Any) -> Callable[[], list[Any]]:
    """Return a function that returns a ModelCheckpoint."""
    return lambda: [lc.ModelCheckpoint(**options)]


def stopper(**options: Any) -> Callable[[], list[Any]]:
    """Return a function that returns an EarlyStopping."""
    return lambda: [lc.EarlyStopping(**options)]


both = {"on_step": True, "on_epoch": True}
SETTINGS = {
    "log on_step and on_epoch": fit(logs(**both)),
    "log prog_bar without logger": fit(logs(prog_bar=True, logger=False)),
    "log reduce_fx": fit(logs(reduce_fx="max", **both)).because(REDUCED, *LOGS),
    "log_dict of floats": fit(lambda m, loss: m.log_dict({"a": loss.item(), "b": 2.0}, **both)),
    "torchmetrics on_epoch": fit(metrics),
    "torchmetrics on_step": fit(partial(metrics, on_step=True)).because(METRICS, *LOGS),
    "log_every_n_steps": fit(log_every_n_steps=3),
    "val_check_interval 5": fit(val_check_interval=5),
    "val_check_interval 0.5": fit(val_check_interval=0.5),
    "val_check_interval over epochs": fit(val_check_interval=17, check_val_every_n_epoch=None),
    "check_val_every_n_epoch": fit(check_val_every_n_epoch=2, num_sanity_val_steps=0),
    "limit_val_batches, two loaders": fit(limit_val_batches=2, data=Data, num_sanity_val_steps=-1),
    "no validation": fit(of=NoValidation),
    "max_steps in an epoch": fit(max_steps=17, max_epochs=-1),
    "min_steps and EarlyStopping": fit(min_steps=30, callbacks=stopper(monitor="val_loss", min_delta=9.0)),
    "EarlyStopping by the train loss": fit(
        logs(**both), callbacks=stopper(monitor="loss_epoch", patience=1, min_delta=9.0), max_epochs=9
    ),
    "gradient_clip_val": fit(gradient_clip_val=0.1).because(CLIPPED, "events"),
    "bf16-mixed": fit(of=lambda step: Classifier(step).float(), precision="bf16-mixed")._replace(tolerance=2e-2),
    "64-true, AdamW with groups": fit(of=partial(Classifier, optimizer=ADAMW), precision="64-true"),
    "StepLR by steps, frequency 2": fit(of=rates(lrs.StepLR, frequency=2, step_size=3)),
    "ReduceLROnPlateau by epochs": fit(
        of=rates(lrs.ReduceLROnPlateau, "epoch", monitor="val_loss", patience=0, threshold=9.0)
    ),
    "warm-up and LearningRateMonitor": fit(
        of=rates(lrs.LambdaLR, lr_lambda=lambda n: min(1, n / 9)), callbacks=lambda: [lc.LearningRateMonitor()]
    ),
    "OneCycleLR": fit(of=rates(lrs.OneCycleLR, max_lr=0.2, total_steps=39)),
    "ModelCheckpoint by steps": fit(callbacks=saver(every_n_train_steps=4, save_top_k=-1, save_last=True)),
    "ModelCheckpoint by a metric": fit(
        callbacks=saver(monitor="val_loss", save_top_k=2, filename="{epoch}-{step}"), max_epochs=4
    ),
    "resume in an epoch": fit(
        resume="*=18.ckpt", callbacks=saver(every_n_train_steps=18), data=partial(loader, kind=StatefulDataLoader)
    ),
    "resume at an epoch's end": fit(resume="*step=13.ckpt", callbacks=saver(save_top_k=-1)),
    "StochasticWeightAveraging": fit(callbacks=lambda: [lc.StochasticWeightAveraging(0.05, 1)]),
    "EMAWeightAveraging": fit(callbacks=lambda: [lc.EMAWeightAveraging()]),
    "BackboneFinetuning": fit(of=Tuned, callbacks=lambda: [lc.BackboneFinetuning(1, backbone_initial_lr=0.01)]),
    "frozen parameters": fit(of=partial(Tuned, frozen=True)),
    "hooks of the module": fit(of=rates(lrs.StepLR, of=Hooks, step_size=5)),
    "on_after_batch_transfer": fit(of=Scaled).because(UNMOVED, "events"),
    "gradients after the step": fit(callbacks=lambda: [lc.LambdaCallback(on_train_batch_end=gradients)]).because(
        NONE, *LOGS
    ),
    "drop_last and workers": fit(data=partial(loader, drop_last=True, num_workers=1, persistent_workers=True)),
    "batches of dicts": fit(data=partial(loader, collate_fn=named)),
    "two optimizers by hand": fit(of=Manual),
    "fast_dev_run": fit(fast_dev_run=3),
    "barebones": fit(lambda m, loss: None, barebones=True),
    "deterministic, profiler, anomaly": fit(deterministic=True, profiler="simple", detect_anomaly=True),
    "reloaded loaders, evaluations": fit(calls=evaluate, reload_dataloaders_every_n_epochs=1),
    "a dict with the loss": fit(lambda m, loss: {"loss": loss, "n": m.target}).because(OF_LAST, "events"),
    "ModelPruning": fit(callbacks=lambda: [lc.ModelPruning("l1_unstructured", amount=0.2)]),
    "logs of other hooks": fit(of=Logging),
    "OnExceptionCheckpoint and Timer": fit(callbacks=lambda: [lc.OnExceptionCheckpoint("x"), lc.Timer()]),
    "ModelCheckpoint by the train loss": fit(
        logs(**both), callbacks=saver(monitor="loss_step", every_n_train_steps=3, save_last="link", mode="max")
    ),
    "LBFGS": fit(of=partial(Classifier, optimizer=lambda m: optim.LBFGS(m.parameters()))).refuses(
        "LBFGS cannot be the inner optimizer"
    ),
    "overfit_batches": fit(overfit_batches=2).refuses("`overfit_batches` must be 0"),
    "limit_train_batches": fit(limit_train_batches=4).refuses("`limit_train_batches` must be 1.0"),
    "clipping by value": fit(gradient_clip_val=0.1, gradient_clip_algorithm="value").refuses(
        "`gradient_clip_algorithm` must be"
    ),
    "accumulation": fit(callbacks=lambda: [lc.GradientAccumulationScheduler({1: 2})]).refuses(
        "`GradientAccumulationScheduler` must be left out"
    ),
    "an iterable dataset": fit(data=lambda plain: loader(plain, Stream())).refuses("the dataset must have an index"),
    "no loss": fit(lambda m, loss: {}).refuses("each step() must follow the backward()"),
}

if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    compare("Lightning", SETTINGS, Reader(OWN))
