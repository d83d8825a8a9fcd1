"""Trainers of Ignite against those with a constant trace, in many settings: see differential_common.

PYTHONPATH=test python benchmarks/differential_ignite.py
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ignite.handlers as ih
import ignite.metrics as im
from ignite.engine import Events
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as lrs

import differential_ignite_handlers as jobs
from differential_common import Outcome, Setting, compare, files
from differential_ignite_handlers import EPOCH, ITERATION, Run, evaluate, metric, on, rate, save
from helpers.yardstick import CLASSES

LATER = "a run continues with the samples that follow, where Ignite begins an epoch anew"
NONE = "gradients are None after the step"
STEPS = "the step function, and the events that it fires, run for each microbatch"
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


def train(
    *attach: Callable[[Run], Any], make: Any = jobs.supervised, optimizer: Any = MOMENTUM, again: str = "",
    data: Mapping[str, Any] | None = None, runs: Sequence[dict[str, int]] = ({"max_epochs": 3},), **options: Any,
) -> Callable[[bool, Path], Outcome]:  # fmt: skip
    """Return a function that trains in a setting.

    Args:
        *attach: functions that add handlers.
        make: function that returns the trainer.
        optimizer: function that returns the optimizer.
        again: name of a checkpoint, from which another run resumes.
        data: options of the loader.
        runs: arguments of each call of `run`.
        **options: options of the trainer.
    """

    def trained(plain: bool, folder: Path) -> Outcome:
        folder.mkdir()
        run = Run(plain, folder, make, optimizer, data or {}, options)
        for each in attach:
            each(run)
        for arguments in runs:
            run.trainer.run(run.loader, **arguments)
        if again:
            run = Run(plain, folder, make, optimizer, data or {}, options)
            ih.Checkpoint.load_objects(run.parts, str(next(folder.rglob(again))))
            run.trainer.run(run.loader, **runs[-1])
        state = run.trainer.state
        logs = [run.logs, state.iteration, state.epoch, state.max_epochs, dict(state.metrics), state.output]
        return Outcome(run.model.state_dict(), logs, run.events, files(folder))

    return trained


def later(*attach: Callable[[Run], Any], **options: Any) -> Setting:
    """Return a setting in which Ignite begins an epoch anew."""
    return Setting(train(*attach, **options), dict.fromkeys(("weights", "logs", "events"), LATER))


def end(act: str) -> Callable[[Run], Any]:
    """Return what calls a method of the trainer after an update within an epoch."""
    return on(ITERATION(once=20), lambda run: getattr(run.trainer, act)())


pairs: Any = {"output_transform": lambda x, y, y_pred, loss: (y_pred, y)}
average, twice = partial(im.RunningAverage, output_transform=float), [{"max_epochs": 3}] * 2
SETTINGS = {
    "a number": Setting(train()),
    "AdamW": Setting(train(optimizer=partial(AdamW, lr=0.01))),
    "Accuracy and Loss": Setting(train(metric(im.Accuracy, partial(im.Loss, cross_entropy)), **pairs)),
    "Precision, Recall": Setting(train(metric(partial(im.ConfusionMatrix, CLASSES), im.Precision, im.Recall), **pairs)),
    "metrics by the batch": Setting(train(metric(im.Accuracy, usage=im.BatchWise()), **pairs)),
    "metrics of some batches": Setting(train(metric(im.Accuracy, usage=im.BatchFiltered(every=3)), **pairs)),
    "RunningAverage": Setting(train(metric(average))),
    "RunningAverage over epochs": Setting(train(metric(partial(average, epoch_bound=False)))),
    "RunningAverage of a metric": Setting(train(metric(lambda: im.RunningAverage(im.Accuracy())), **pairs)),
    "Average, GeometricAverage": Setting(train(metric(im.Average, im.GeometricAverage))),
    "a dict": Setting(train(output_transform=lambda x, y, p, loss: {"loss": loss.item(), "y": y, "rows": [p, loss]})),
    "a named tuple": Setting(train(output_transform=lambda x, y, p, loss: jobs.Found(loss.item(), p))),
    "prepare_batch": Setting(train(prepare_batch=lambda b, **_: (b["x"], b["y"]), data={"collate_fn": jobs.named})),
    "model_transform": Setting(train(model_transform=lambda out: out * 2)),
    "model_fn": Setting(train(model_fn=lambda model, x: model(x * 2))),
    "evaluations by epochs": Setting(train(on(EPOCH, evaluate))),
    "evaluations by iterations": Setting(train(on(ITERATION(every=5) | Events.STARTED | Events.COMPLETED, evaluate))),
    "EarlyStopping and the best": Setting(train(jobs.best, on(EPOCH, evaluate), runs=({"max_epochs": 9},))),
    "Checkpoint by iterations": Setting(train(save(ITERATION(every=5)))),
    "Checkpoint by epochs": Setting(train(save(EPOCH(every=2) | Events.COMPLETED))),
    "LRScheduler": Setting(train(rate(lambda inner: ih.LRScheduler(lrs.StepLR(inner, 5, 0.5))))),
    "LRScheduler by epochs": Setting(
        train(rate(lambda inner: ih.LRScheduler(lrs.ExponentialLR(inner, 0.5)), Events.EPOCH_STARTED))
    ),
    "a scheduler of torch": Setting(train(jobs.of_torch)),
    "PiecewiseLinear": Setting(train(rate(lambda inner: ih.PiecewiseLinear(inner, "lr", [(0, 0.0), (9, 0.1)])))),
    "warm-up": Setting(
        train(rate(lambda inner: ih.create_lr_scheduler_with_warmup(lrs.StepLR(inner, 9), 0.0, 5, 0.1)))
    ),
    "a cycle of the momentum": Setting(
        train(rate(lambda inner: ih.LinearCyclicalScheduler(inner, "momentum", 0.5, 0.9, 13)))
    ),
    "ReduceLROnPlateau": Setting(train(jobs.plateau, on(EPOCH, evaluate))),
    "LambdaStateScheduler": Setting(train(jobs.parameter, save(ITERATION(every=9)))),
    "filters of events": Setting(train(jobs.filters)),
    "EMAHandler": Setting(train(jobs.average)),
    "ProgressBar": Setting(train(jobs.progress)),
    "EpochOutputStore": Setting(train(jobs.store, **pairs)),
    "common handlers": Setting(train(jobs.common)),
    "TerminateOnNan": Setting(train(rate(lambda _: ih.TerminateOnNan(), ITERATION), optimizer=partial(SGD, lr=1e200))),
    "max_iters": Setting(train(runs=({"max_iters": 20},))),
    "two runs": Setting(train(runs=({"max_epochs": 2}, {"max_epochs": 4}))),
    "terminate": Setting(train(end("terminate"))),
    "interrupt and run": Setting(train(end("interrupt"), runs=twice)),
    "terminate and run": later(end("terminate"), runs=twice),
    "terminate_epoch": later(end("terminate_epoch")),
    "a hidden exception": later(jobs.failing),
    "resume after an epoch": Setting(train(save(EPOCH), again="*_26.pt")),
    "resume in an epoch": later(save(ITERATION(every=5)), again="*_20.pt"),
    "drop_last and workers": Setting(train(data={"drop_last": True, "num_workers": 1})),
    "a step by hand, clipped": Setting(train(make=jobs.by_hand, clip=True)),
    "events of the step": Setting(train(make=jobs.by_hand, fire=True), {"logs": STEPS}),
    "gradients after the step": Setting(
        train(on(ITERATION, lambda run: run.log(run.model[0].weight.grad is not None))), {"logs": NONE}
    ),
    "FastaiLRFinder": Setting(train(jobs.find), refused=True),
    "amp_mode": Setting(train(amp_mode="amp", device="cpu"), refused=True),
    "deterministic": Setting(train(deterministic=True), refused=True),
    "accumulation": Setting(train(gradient_accumulation_steps=2), refused=True),
    "epoch_length": Setting(train(runs=({"max_epochs": 2, "epoch_length": 5},)), refused=True),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    compare("Ignite", SETTINGS)
