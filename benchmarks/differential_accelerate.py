"""Does an ordinary loop of Accelerate come out the same with `prepare` of ours, setting by setting?

The loop is the same on both sides, but for what docs/trainers/accelerate.md names: no `skip_first_batches` after a
resume, and `count=` of losses that are sums. Compared are the weights, what trackers and `gather_for_metrics` get, what
the accelerator, the optimizer and schedulers show at each update, and the files.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Subset
from transformers import get_scheduler

from differential import Reader, Setting, compare
from helpers.yardstick import Samples, network
from settings_accelerate import Rows, train, with_all

BROKEN_OFF = "the next loop yields the rest of the epoch"
DRAWS = "random numbers are drawn for each microbatch"
LATER = "the norm is that of the last update, because the gradient is complete only in step()"
MICROBATCHES = "len(loader) and means of losses are those of microbatches"
POSITION = "the position is saved with the optimizer, and not with the loader"
STATISTICS = "statistics are those of a microbatch"


def of(**options: Any) -> Setting:
    """Return a setting of the loop."""
    return Setting(partial(train, options))


def steps(inner: Any, _: int) -> Any:
    return StepLR(inner, 4, 0.8)


def total_of_batches(inner: Any, batches: int) -> Any:
    return get_scheduler("linear", inner, 2, 3 * batches)


def groups(models: Any) -> Any:
    first, second = models[0][0], models[0][-1]
    return SGD([{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "lr": 0.05}], momentum=0.9)


def frozen() -> list[nn.Module]:
    model = network()
    model[0].requires_grad_(False)
    return [model]


def normalized() -> list[nn.Module]:
    return [network().insert(1, nn.BatchNorm1d(16).double())]


def configured(**options: Any) -> Any:
    return lambda folder: {"dataloader_config": DataLoaderConfiguration(**options)}


def named(folder: Path) -> Any:
    return {"project_config": ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)}


SHORT = {"data": lambda: Subset(Samples(), range(90))}
SETTINGS = {
    "AdamW": of(),
    "objects in another order": of(scheduler=steps, order=("scheduler", "loader", "optimizer", "test", "model 0")),
    "a scheduler each batch, StepLR": of(scheduler=steps),
    "a scheduler that is prepared later": of(scheduler=steps, scheduler_later=True),
    "a scheduler after sync_gradients": of(scheduler=steps, step_schedule="updates"),
    "step_scheduler_with_optimizer False, after sync_gradients": of(
        scheduler=steps, step_schedule="updates", settings=lambda folder: {"step_scheduler_with_optimizer": False}
    ),
    "step_scheduler_with_optimizer False, each epoch": of(
        scheduler=steps, step_schedule="epochs", settings=lambda folder: {"step_scheduler_with_optimizer": False}
    ),
    "a scheduler each epoch": of(scheduler=steps, step_schedule="epochs"),
    "zero_grad before forward, evaluations within an epoch": of(zero_first=True, evaluate_at=(2, 6, 9)),
    "ReduceLROnPlateau by a metric of the epoch": of(
        scheduler=lambda inner, _: ReduceLROnPlateau(inner, patience=0, threshold=1), step_schedule="metric"
    ),
    "OneCycleLR of all updates": of(scheduler=lambda inner, _: OneCycleLR(inner, 0.1, total_steps=18)),
    "CosineAnnealingLR, SGD with momentum": of(
        scheduler=lambda inner, _: CosineAnnealingLR(inner, 18),
        inner=with_all(SGD, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "a schedule of 3 * len(loader)": of(scheduler=total_of_batches).because(MICROBATCHES),
    "clip_grad_norm_ after sync_gradients": of(clip=0.5),
    "clip_grad_norm_ at each batch": of(clip=0.5, clip_always=True),
    "clip_grad_norm_, without accumulate": of(clip=0.5, accumulate=False, scheduler=steps),
    "the norm that clip_grad_norm_ returns": of(clip=0.5, log_norm=True).because(LATER, "logs"),
    "clip_grad_value_": of(clip_value=0.1).refuses("clip_grad_value_() must see the whole gradient of an update"),
    "two batches of 8 that Accelerate accumulates": of(
        plain={"rows": 8, "gradient_accumulation_steps": 2}, scheduler=steps
    ),
    "gather_for_metrics in the training": of(gather=True, **SHORT),
    "a last batch of 10 rows": of(**SHORT, scheduler=steps),
    "drop_last": of(**SHORT, loader={"drop_last": True}),
    "total_loss / len(loader)": of(mean_over_loader=True),
    "total_loss / len(loader) with a last batch of 10 rows": of(mean_over_loader=True, **SHORT).because(
        MICROBATCHES, "logs"
    ),
    "not shuffled": of(shuffle=False),
    "two workers, persistent": of(loader={"num_workers": 2, "persistent_workers": True}),
    "set_epoch in the loop": of(set_epoch=True),
    "save_state, resume within an epoch": of(save_at=(4, 8), stop=8, resume=True, scheduler=steps),
    "save_state, resume at the end of an epoch": of(save_at=(12,), stop=12, resume=True, scheduler=steps, clip=0.5),
    "automatic_checkpoint_naming, total_limit": of(settings=named, automatic_names=True, scheduler=steps),
    "use_stateful_dataloader": of(settings=configured(use_stateful_dataloader=True), save_at=(6,)).because(
        POSITION, "files"
    ),
    "even_batches False": of(settings=configured(even_batches=False), **SHORT),
    "split_batches": of(settings=configured(split_batches=True)).refuses("split_batches must be None or False"),
    "dispatch_batches": of(settings=configured(dispatch_batches=True)).refuses(
        "dispatch_batches must be None or False"
    ),
    "device_placement False": of(settings=lambda folder: {"device_placement": False}),
    "Adagrad, weight_decay": of(inner=with_all(Adagrad, lr=0.05, weight_decay=0.1), scheduler=steps),
    "RMSprop": of(inner=with_all(RMSprop, lr=0.01, momentum=0.5)),
    "two groups of parameters, LambdaLR": of(
        inner=groups, scheduler=lambda inner, _: LambdaLR(inner, [lambda n: 0.9**n, lambda n: 1 / (n + 1)])
    ),
    "frozen parameters, AdamW with amsgrad": of(make_models=frozen, inner=with_all(AdamW, lr=0.02, amsgrad=True)),
    "two models": of(make_models=lambda: [network()[:2], network()[2]]),
    "a GradScaler and an overflow": of(
        settings=lambda folder: {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}, infinite_at=7, scheduler=steps
    ),
    "means over tokens": of(tokens=True, data=Rows),
    "bf16": of(settings=lambda folder: {"mixed_precision": "bf16"})._replace(tolerance=0.02),
    "break at an update": of(stop=3).because(BROKEN_OFF),
    "dropout": of(make_models=lambda: [network(0.2)]).because(DRAWS, "weights", "logs", "files"),
    "batch normalization": of(make_models=normalized).because(STATISTICS, "weights", "logs", "files"),
}

if __name__ == "__main__":
    compare("Accelerate", SETTINGS, Reader())
