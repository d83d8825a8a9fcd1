"""Does a training by an Engine of Ignite come out the same with ours, setting by setting?"""

from __future__ import annotations

import logging
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

import settings_ignite as jobs
from differential import TRAINED, Reader, Setting, compare
from helpers.our_order import named
from helpers.yardstick import CLASSES
from settings_ignite import EPOCH, ITERATION, Run, evaluate, metric, on, rate, save

LATER = "a run continues with the samples that follow, where Ignite begins an epoch anew"
NONE = "gradients are None after the step"
STEPS = "the step function, and the events that it fires, run for each microbatch"
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


def train(
    *attach: Callable[[Run], Any], make: Any = jobs.supervised, optimizer: Any = MOMENTUM, again: str = "",
    data: Mapping[str, Any] | None = None, runs: Sequence[dict[str, int]] = ({"max_epochs": 3},), **options: Any,
) -> Setting:  # fmt: skip
    """Return a setting.

    Args:
        *attach: functions that add handlers.
        make: function that returns the trainer.
        optimizer: function that returns the optimizer.
        again: name of a checkpoint, from which another run resumes.
        data: options of the loader.
        runs: arguments of each call of `run`.
        **options: options of the trainer.
    """

    def trained(plain: bool, folder: Path) -> tuple[Any, Any, Any]:
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
        return run.model.state_dict(), logs, run.events

    return Setting(trained)


def later(*attach: Callable[[Run], Any], **options: Any) -> Setting:
    """Return a setting in which Ignite begins an epoch anew."""
    return train(*attach, **options).because(LATER, *TRAINED)


def end(act: str) -> Callable[[Run], Any]:
    """Return what calls a method of the trainer after an update within an epoch."""
    return on(ITERATION(once=20), lambda run: getattr(run.trainer, act)())


pairs: Any = {"output_transform": lambda x, y, y_pred, loss: (y_pred, y)}
average, twice = partial(im.RunningAverage, output_transform=float), [{"max_epochs": 3}] * 2
SETTINGS = {
    "a number": train(),
    "AdamW": train(optimizer=partial(AdamW, lr=0.01)),
    "Accuracy and Loss": train(metric(im.Accuracy, partial(im.Loss, cross_entropy)), **pairs),
    "Precision, Recall": train(metric(partial(im.ConfusionMatrix, CLASSES), im.Precision, im.Recall), **pairs),
    "metrics by the batch": train(metric(im.Accuracy, usage=im.BatchWise()), **pairs),
    "metrics of some batches": train(metric(im.Accuracy, usage=im.BatchFiltered(every=3)), **pairs),
    "RunningAverage": train(metric(average)),
    "RunningAverage over epochs": train(metric(partial(average, epoch_bound=False))),
    "RunningAverage of a metric": train(metric(lambda: im.RunningAverage(im.Accuracy())), **pairs),
    "Average, GeometricAverage": train(metric(im.Average, im.GeometricAverage)),
    "a dict": train(output_transform=lambda x, y, p, loss: {"loss": loss.item(), "y": y, "rows": [p, loss]}),
    "a named tuple": train(output_transform=lambda x, y, p, loss: jobs.Found(loss.item(), p)),
    "prepare_batch": train(prepare_batch=lambda b, **_: (b["x"], b["y"]), data={"collate_fn": named}),
    "model_transform": train(model_transform=lambda out: out * 2),
    "model_fn": train(model_fn=lambda model, x: model(x * 2)),
    "evaluations by epochs": train(on(EPOCH, evaluate)),
    "evaluations by iterations": train(on(ITERATION(every=5) | Events.STARTED | Events.COMPLETED, evaluate)),
    "EarlyStopping and the best": train(jobs.best, on(EPOCH, evaluate), runs=({"max_epochs": 9},)),
    "Checkpoint by iterations": train(save(ITERATION(every=5))),
    "Checkpoint by epochs": train(save(EPOCH(every=2) | Events.COMPLETED)),
    "LRScheduler": train(rate(lambda inner: ih.LRScheduler(lrs.StepLR(inner, 5, 0.5)))),
    "LRScheduler by epochs": train(
        rate(lambda inner: ih.LRScheduler(lrs.ExponentialLR(inner, 0.5)), Events.EPOCH_STARTED)
    ),
    "a scheduler of torch": train(jobs.of_torch),
    "PiecewiseLinear": train(rate(lambda inner: ih.PiecewiseLinear(inner, "lr", [(0, 0.0), (9, 0.1)]))),
    "warm-up": train(rate(lambda inner: ih.create_lr_scheduler_with_warmup(lrs.StepLR(inner, 9), 0.0, 5, 0.1))),
    "a cycle of the momentum": train(rate(lambda inner: ih.LinearCyclicalScheduler(inner, "momentum", 0.5, 0.9, 13))),
    "ReduceLROnPlateau": train(jobs.plateau, on(EPOCH, evaluate)),
    "LambdaStateScheduler": train(jobs.parameter, save(ITERATION(every=9))),
    "filters of events": train(jobs.filters),
    "EMAHandler": train(jobs.average),
    "ProgressBar": train(jobs.progress),
    "EpochOutputStore": train(jobs.store, **pairs),
    "common handlers": train(jobs.common),
    "TerminateOnNan": train(rate(lambda _: ih.TerminateOnNan(), ITERATION), optimizer=partial(SGD, lr=1e200)),
    "max_iters": train(runs=({"max_iters": 20},)),
    "two runs": train(runs=({"max_epochs": 2}, {"max_epochs": 4})),
    "terminate": train(end("terminate")),
    "interrupt and run": train(end("interrupt"), runs=twice),
    "terminate and run": later(end("terminate"), runs=twice),
    "terminate_epoch": later(end("terminate_epoch")),
    "a hidden exception": later(jobs.failing),
    "resume after an epoch": train(save(EPOCH), again="*_26.pt"),
    "resume in an epoch": later(save(ITERATION(every=5)), again="*_20.pt"),
    "drop_last and workers": train(data={"drop_last": True, "num_workers": 1}),
    "a step by hand, clipped": train(make=jobs.by_hand, clip=True),
    "events of the step": train(make=jobs.by_hand, fire=True).because(STEPS, "logs"),
    "gradients after the step": train(on(ITERATION, lambda run: run.log(run.model[0].weight.grad is not None))).because(
        NONE, "logs"
    ),
    "FastaiLRFinder": train(jobs.find).refuses("AssertionError"),
    "amp_mode": train(amp_mode="amp", device="cpu").refuses("amp_mode"),
    "deterministic": train(deterministic=True).refuses("deterministic"),
    "accumulation": train(gradient_accumulation_steps=2).refuses(
        "every microbatch of an update must reach optimizer.step()"
    ),
    "epoch_length": train(runs=({"max_epochs": 2, "epoch_length": 5},)).refuses("epoch_length"),
}

if __name__ == "__main__":
    logging.disable(logging.ERROR)
    compare("Ignite", SETTINGS, Reader(("vbs",)))
