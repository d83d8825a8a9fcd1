"""A loop of Accelerate with settings, for comparing runs of Accelerate itself with ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.tracking import GeneralTracker, on_main_process
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Subset

from helpers.accelerate_jobs import reset
from helpers.our_order import BATCH, ROWS, SAMPLES, Shuffled
from helpers.yardstick import Samples, network
from variable_batch_size.integrations.accelerate import prepare

EPOCHS = 3


class Lines(GeneralTracker):
    """A tracker that writes a line for each log."""

    name, requires_logging_directory = "lines", False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Any:
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.log(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([step, values]) + "\n")


class Average:
    """An average of the weights, which is saved beside the states."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.values = model, [value.detach().clone() for value in model.parameters()]

    def update(self) -> None:
        for average, value in zip(self.values, self.model.parameters(), strict=True):
            average.lerp_(value.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def train(options: Mapping[str, Any], plain: bool, folder: Path) -> tuple[Any, Any, Any]:
    """Run a loop with these options, and return weights, logs and events."""
    loop = Loop(folder, not plain, **options).run()
    path = folder / "tracked.jsonl"
    tracked = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()  # it is of the logs, and not of the files
    return [model.state_dict() for model in loop.models], [tracked, loop.logs], loop.events


def with_all(kind: Callable[..., Optimizer], **options: Any) -> Callable[[Sequence[nn.Module]], Optimizer]:
    """A function that creates an optimizer of all parameters of models."""
    return lambda models: kind([p for model in models for p in model.parameters() if p.requires_grad], **options)


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Rows of six tokens each, of which some do not count."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(2)
        self.x = torch.randn(SAMPLES, 6, 6, generator=drawn, dtype=torch.float64)
        self.target = torch.randint(5, (SAMPLES, 6), generator=drawn)
        lengths = torch.randint(1, 7, (SAMPLES,), generator=drawn)
        self.target[torch.arange(6) >= lengths[:, None]] = -100

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.target[index]


ADAMW = with_all(AdamW, lr=0.02)


@dataclass
class Loop:
    """A training, which is the same on both sides; its options say what it does.

    Attributes:
        folder: where it writes.
        variable: whether `prepare` is ours, with microbatches; otherwise that of Accelerate, with batches.
        settings: arguments of the Accelerator; a function of the folder.
        plain: further ones of the plain side, and rows of its batches, as "rows".
        scheduler: function of the optimizer and of the number of batches, for a schedule.
        order: the order in which objects are prepared.
        step_schedule: when the schedule steps: with "batches", "updates", "epochs", or with a "metric" of them.
        clip: maximum norm, or None; `clip_always`: also before the last microbatch.
        stop: the update at which the loop is left: with `resume` for another one, or for the next epoch.
    """

    folder: Path
    variable: bool
    settings: Callable[[Path], Mapping[str, Any]] = lambda folder: {}
    plain: Mapping[str, Any] = field(default_factory=dict)
    make_models: Callable[[], list[nn.Module]] = lambda: [network()]
    data: Callable[[], Any] = lambda: Subset(Samples(), range(SAMPLES))
    loader: Mapping[str, Any] = field(default_factory=dict)
    shuffle: bool = True
    inner: Callable[[Sequence[nn.Module]], Optimizer] = ADAMW
    scheduler: Callable[[Any, int], Any] | None = None
    scheduler_later: bool = False
    step_schedule: str = "batches"
    order: Sequence[str] = ()
    accumulate: bool = True
    clip: float | None = None
    clip_always: bool = False
    log_norm: bool = False
    clip_value: float | None = None
    gather: bool = False
    mean_over_loader: bool = False
    set_epoch: bool = False
    tokens: bool = False
    infinite_at: int = -1
    zero_first: bool = False
    evaluate_at: Sequence[int] = ()
    automatic_names: bool = False
    save_at: Sequence[int] = ()
    stop: int = -1
    resume: bool = False

    def __post_init__(self) -> None:
        self.events: list[Any] = []
        self.logs: list[Any] = []
        self.create()

    def create(self) -> None:
        """Create and prepare all objects."""
        reset()
        torch.manual_seed(0)
        settings = {"cpu": True, "log_with": [Lines(self.folder / "tracked.jsonl")], **self.settings(self.folder)}
        scaler = settings.pop("scaler", None)
        rows, own = ROWS, {}
        if not self.variable:
            own = dict(self.plain)
            rows = own.pop("rows", BATCH)
        self.accelerator = accelerator = Accelerator(**{**settings, **own})
        accelerator.scaler = scaler or accelerator.scaler
        accelerator.init_trackers("run", {"batch": BATCH})
        data, self.models = self.data(), self.make_models()
        ordered = {"shuffle": self.shuffle} if self.variable else {"sampler": Shuffled(len(data), shuffle=self.shuffle)}
        loader = DataLoader(data, rows, **ordered, **self.loader)
        inner = self.inner(self.models)
        inner.register_step_post_hook(lambda *_: self.events.append("step of torch"))
        schedule = None if self.scheduler is None else self.scheduler(inner, len(loader))
        named = {f"model {number}": model for number, model in enumerate(self.models)}
        named |= {"loader": loader, "optimizer": inner, "test": DataLoader(Subset(Samples(), range(96, 131)), 8)}
        if schedule is not None and not self.scheduler_later:
            named["scheduler"] = schedule
        names = self.order or list(named)
        ready = partial(prepare, accelerator, trace=BATCH) if self.variable else accelerator.prepare
        if self.variable and self.tokens:
            ready = partial(ready, optimizer_options={"reduction": "sum"})
        found = dict(zip(names, ready(*(named[name] for name in names)), strict=True))
        self.ready = [found[f"model {number}"] for number in range(len(self.models))]
        self.optimizer, self.train, self.test = found["optimizer"], found["loader"], found["test"]
        self.schedule = accelerator.prepare(schedule) if self.scheduler_later else found.get("scheduler")
        self.average = Average(self.models[0])
        accelerator.register_for_checkpointing(self.average)
        self.updates = self.epoch = self.skipped = 0
        self.total, self.counted = torch.zeros((), dtype=torch.float64), 0

    def run(self) -> Loop:
        """Train; with `resume` once more, from the state of the update at which the first training ends."""
        self.loop()
        if self.resume:
            self.create()
            saved = self.folder / f"at-{self.stop}"
            self.accelerator.load_state(str(saved))
            self.updates, self.stop = self.stop, -1
            per_epoch = -(-len(self.train.dataset) // BATCH)
            self.epoch, self.skipped = divmod(self.updates, per_epoch)
            self.loop()
        return self

    def loop(self) -> None:
        """Run epochs."""
        accelerator = self.accelerator
        for epoch in range(self.epoch, EPOCHS):
            losses, batches = 0.0, self.train
            if self.set_epoch or self.skipped or not self.variable:
                batches.set_epoch(epoch)
            if self.skipped and not self.variable:  # ours reads the rest by itself
                batches = skip_first_batches(batches, self.skipped)
                batches.set_epoch(epoch)
            self.skipped = 0
            for x, target in batches:
                losses += self.batch(x, target)
                if accelerator.sync_gradients:
                    self.after_update()
                    if self.updates == self.stop:
                        break
            if self.resume and self.updates == self.stop:
                return
            if self.schedule is not None and self.step_schedule in ("epochs", "metric"):
                self.schedule.step(*([losses / 100] if self.step_schedule == "metric" else []))
            values = {"mean": losses / len(self.train)} if self.mean_over_loader else {}
            accelerator.log({"hits": self.evaluate(), **values}, step=self.updates)
            if self.automatic_names:
                accelerator.save_state()
        accelerator.save_model(self.ready[0], str(self.folder / "model"))
        accelerator.end_training()

    def batch(self, x: Tensor, target: Tensor) -> float:
        """Run a batch or microbatch, and return its loss."""
        with self.accelerator.accumulate(*self.ready) if self.accumulate else nullcontext():
            loss = self.step(x, target)
        return float(loss)

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        """Run forward, backward and the steps of a batch or microbatch, and return its loss."""
        accelerator, options = self.accelerator, {}
        if self.zero_first:
            self.optimizer.zero_grad()
        for model in self.ready:
            x = model(x)
        loss = cross_entropy(x.flatten(0, -2), target.flatten())
        if self.tokens and self.variable:
            options["count"] = (target != -100).sum()
            loss = loss * options["count"]
        accelerator.backward(loss * torch.inf if self.updates == self.infinite_at else loss)
        parameters = [parameter for model in self.ready for parameter in model.parameters()]
        if self.clip is not None and (accelerator.sync_gradients or self.clip_always):
            norm = accelerator.clip_grad_norm_(parameters, self.clip)
            if self.log_norm and accelerator.sync_gradients:
                self.logs.append(float(norm))
        if self.clip_value is not None:
            accelerator.clip_grad_value_(parameters, self.clip_value)
        self.optimizer.step(**options)
        if self.schedule is not None and (
            self.step_schedule == "batches" or (self.step_schedule == "updates" and accelerator.sync_gradients)
        ):
            self.schedule.step()
        if not self.zero_first:
            self.optimizer.zero_grad()
        if self.gather:
            self.logs += accelerator.gather_for_metrics(x.argmax(-1)).tolist()
        count = (target != -100).sum()
        self.total = self.total + (loss.detach() if options else loss.detach() * count)
        self.counted += count
        return loss.detach()

    def after_update(self) -> None:
        """Log, save, and note what all show."""
        accelerator, self.updates = self.accelerator, self.updates + 1
        rates = [group["lr"] for group in self.optimizer.param_groups]
        ends = accelerator.gradient_state.end_of_dataloader
        shown = [self.updates, rates, ends, accelerator.optimizer_step_was_skipped]
        if self.schedule is not None:
            shown += [self.schedule.scheduler.last_epoch, *self.schedule.get_last_lr()]
        self.events.append(shown)
        self.average.update()
        accelerator.log({"loss": float(self.total / self.counted), "lr": rates[0]}, step=self.updates)
        self.total, self.counted = torch.zeros((), dtype=torch.float64), 0
        if self.updates in self.evaluate_at:
            self.events.append(
                [self.evaluate(), accelerator.sync_gradients, accelerator.gradient_state.end_of_dataloader]
            )
        if self.updates in self.save_at:
            accelerator.save_state(str(self.folder / f"at-{self.updates}"))

    def evaluate(self) -> int:
        """Return how many samples of the evaluation are right."""
        hits = 0
        if self.tokens or len(self.ready) > 1:  # the evaluation is of one model and of rows
            return hits
        self.ready[0].eval()
        with torch.no_grad():
            for x, target in self.test:
                hits += int(self.accelerator.gather_for_metrics(self.ready[0](x).argmax(-1) == target).sum())
        self.ready[0].train()
        return hits
