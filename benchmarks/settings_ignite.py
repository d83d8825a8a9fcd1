"""Trainers and handlers of Ignite for comparing a plain training with ours."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ignite.handlers as ih
import ignite.metrics as im
import torch
from ignite.contrib.engines.common import setup_common_training_handlers
from ignite.engine import Engine, EventEnum, Events, create_supervised_evaluator
from ignite.engine import create_supervised_trainer as create_plain
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader

from helpers.our_order import BATCH, loader
from helpers.yardstick import Samples, network
from variable_batch_size.integrations.ignite import VariableBatchEngine, create_supervised_trainer, variable_batch

EPOCH, ITERATION = Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED
WITHIN = {event for event in Events if "iteration" in event.value or event == Events.EPOCH_STARTED}


class Run:
    """A training under way, which handlers of a setting are attached to."""

    def __init__(self, plain: bool, folder: Path, make: Any, optimizer: Any, data: Any, options: Any) -> None:
        torch.manual_seed(1)
        self.plain, self.folder = plain, folder
        self.model = network()
        self.loader = loader(plain, **data)
        self.validation = DataLoader(Samples(), 50)
        self.inner = optimizer(self.model.parameters())
        self.logs: list[Any] = []
        self.trainer = make(self, options)
        self.evaluator = create_supervised_evaluator(
            self.model, {"accuracy": im.Accuracy(), "loss": im.Loss(cross_entropy)}
        )
        self.events: list[Any] = []
        for event in {*Events} - {Events.EXCEPTION_RAISED}:  # a handler of which would hide the exception
            self.trainer.add_event_handler(event, partial(self.note, event))

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.inner, "trainer": self.trainer}

    def note(self, event: Any, *_: Any, **__: Any) -> None:
        state = self.trainer.state
        batch = [state.batch] if self.plain else state.batch
        rows = (
            None
            if state.batch is None
            else [torch.cat([part["x"] if isinstance(part, dict) else part[0] for part in batch])]
        )
        length = state.epoch_length if event in WITHIN else 0
        rates = [group["lr"] for group in self.inner.param_groups]
        output = isinstance(state.output, tuple), hasattr(state.output, "_fields"), state.output
        self.events.append(
            [event.value, state.iteration, state.epoch, length, rows, output, dict(state.metrics), rates]
        )

    def log(self, *values: Any) -> None:
        self.logs.append([self.trainer.state.iteration, self.trainer.state.epoch, *values])


def supervised(run: Run, options: dict[str, Any]) -> Engine:
    if run.plain:
        return create_plain(run.model, run.inner, cross_entropy, **options)
    return create_supervised_trainer(run.model, run.inner, cross_entropy, loader=run.loader, trace=BATCH, **options)


class Own(EventEnum):
    """An event of the step."""

    BACKWARD = "backward"


def by_hand(run: Run, options: dict[str, Any]) -> Engine:
    """Return an Engine with a step that clips the gradient, where that is plain, and fires an event."""
    norm: Any = 0.1 if options.get("clip") else None
    optimizer: Any = run.inner
    if not run.plain:
        optimizer = variable_batch(run.inner, run.loader, trace=BATCH, optimizer_options={"max_grad_norm": norm})

    def step(engine: Engine, batch: Any) -> dict[str, Any]:
        loss = cross_entropy(run.model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        if options.get("fire"):
            engine.fire_event(Own.BACKWARD)
        if run.plain and norm:
            nn.utils.clip_grad_norm_(run.model.parameters(), norm)
        optimizer.step()
        return {"loss": loss.item(), "target": batch[1]}

    engine = Engine(step) if run.plain else VariableBatchEngine(step, optimizer)
    if options.get("fire"):
        engine.register_events(*Own)
        engine.add_event_handler(Own.BACKWARD, lambda: run.log("backward"))
    return engine


def on(event: Any, act: Callable[[Run], Any]) -> Callable[[Run], Any]:
    return lambda run: run.trainer.add_event_handler(event, lambda: act(run))


def evaluate(run: Run) -> None:
    run.log(run.evaluator.run(run.validation).metrics)


def score(engine: Engine) -> float:
    return -engine.state.metrics["loss"]


def metric(*kinds: Any, **options: Any) -> Callable[[Run], Any]:

    def attach(run: Run) -> None:
        for number, kind in enumerate(kinds):
            kind().attach(run.trainer, f"metric {number}", **options)

    return attach


def save(event: Any, **options: Any) -> Callable[[Run], Any]:
    return lambda run: run.trainer.add_event_handler(
        event, ih.Checkpoint(run.parts, ih.DiskSaver(run.folder, require_empty=False), n_saved=None, **options)
    )


def best(run: Run) -> None:
    step = ih.global_step_from_engine(run.trainer)
    saver = ih.Checkpoint({"model": run.model}, ih.DiskSaver(run.folder), "best", score, "loss", 2, step)
    for handler in saver, ih.EarlyStopping(2, score, run.trainer, min_delta=9.0):
        run.evaluator.add_event_handler(Events.COMPLETED, handler)


def plateau(run: Run) -> None:
    handler = ih.ReduceLROnPlateauScheduler(run.inner, "loss", run.trainer, patience=0, threshold=9.0)
    run.evaluator.add_event_handler(Events.COMPLETED, handler)


def rate(make: Callable[[Optimizer], Any], event: Any = Events.ITERATION_STARTED) -> Callable[[Run], Any]:
    return lambda run: run.trainer.add_event_handler(event, make(run.inner))


def of_torch(run: Run) -> None:
    scheduler = lrs.CosineAnnealingLR(run.inner, 39)
    run.trainer.add_event_handler(ITERATION, lambda: scheduler.step())


def average(run: Run) -> None:
    handler = ih.EMAHandler(run.model, 0.1)
    handler.attach(run.trainer, event=ITERATION(every=2))
    run.trainer.add_event_handler(Events.COMPLETED, lambda: run.log(handler.ema_model.state_dict()))


def parameter(run: Run) -> None:
    ih.LambdaStateScheduler(lambda step: step * 2, "alpha").attach(run.trainer, ITERATION)
    run.trainer.add_event_handler(ITERATION, lambda: run.log(run.trainer.state.alpha))
    run.trainer.state_dict_user_keys.append("alpha")


def progress(run: Run) -> None:
    bar = ih.ProgressBar(persist=True, file=io.StringIO())
    bar.attach(run.trainer, output_transform=lambda loss: {"loss": loss})
    run.trainer.add_event_handler(ITERATION, lambda: run.log(bar.pbar and [bar.pbar.n, bar.pbar.total]))


def store(run: Run) -> None:
    handler = ih.EpochOutputStore()
    handler.attach(run.trainer, "outputs")
    run.trainer.add_event_handler(EPOCH, lambda: run.log(handler.data))


def common(run: Run) -> None:
    own = {"save_every_iters": 10, "output_path": run.folder, "lr_scheduler": lrs.StepLR(run.inner, 5), "n_saved": 9}
    setup_common_training_handlers(run.trainer, to_save=run.parts, output_names=["loss"], with_pbars=False, **own)


def filters(run: Run) -> None:
    some = ITERATION(once=7), ITERATION(before=5), ITERATION(after=30), ITERATION(event_filter=lambda _, n: n % 7 == 0)
    for number, event in enumerate((*some, EPOCH(once=2), Events.GET_BATCH_STARTED(every=6), Events.STARTED)):
        on(event, lambda run, number=number: run.log(number))(run)  # type: ignore[misc]


def failing(run: Run) -> None:
    run.trainer.add_event_handler(ITERATION(once=20), lambda: {}["key"])
    run.trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: run.log(type(error).__name__))


def find(run: Run) -> None:
    finder = ih.FastaiLRFinder()
    with finder.attach(run.trainer, {"model": run.model, "optimizer": run.inner}, num_iter=8, end_lr=1.0) as trainer:
        trainer.run(run.loader)


class Found(NamedTuple):
    """An output with names."""

    loss: float
    y_pred: torch.Tensor
