"""An ordinary script of Ignite around our trainer; its handlers are the user's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping
from ignite.metrics import EpochMetric
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

import variable_batch_size as vbs
from helpers.trainings import CASES, EVALUATED, Trained, TrainerCase, note_rates
from helpers.yardstick import MICROBATCH, REF
from variable_batch_size.integrations.ignite import VariableBatchEngine, create_supervised_trainer, variable_batch


class Script:
    """What a user's script has; `trainer` is what the changed line makes."""

    def __init__(self, case: TrainerCase = CASES[0], **options: Any) -> None:
        self.case, self.model = case, case.model()
        self.inner = case.optimizer(self.model)
        if case.wrapper == "ddp":
            self.model = DistributedDataParallel(self.model)
        self.loader = DataLoader(case.dataset(), MICROBATCH, shuffle=True, num_workers=case.workers)
        settings: dict[str, Any] = {"trace": case.trace, "rule": case.rule, "ref_batchsize": REF}
        settings["optimizer_options"] = {"max_grad_norm": case.clip}
        trainer: Any
        if case.counting:
            trainer = engine_of_texts(case, self.model, self.inner, self.loader, settings)
        else:
            arguments = self.model, self.inner, case.loss
            trainer = create_supervised_trainer(*arguments, loader=self.loader, **settings, **options)
        self.trainer, self.losses, self.rates = trainer, list[float](), note_rates(self.inner)
        self.scheduler = case.scheduler(self.inner)
        if self.scheduler is not None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: self.scheduler.step())
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._note)

    def _note(self) -> None:
        state, optimizer = self.trainer.state, self.trainer.optimizer
        self.losses.append(float(optimizer.logged["loss"]) if self.case.counting else state.output)

    @property
    def parts(self) -> dict[str, Any]:
        """What is saved: the optimizer is the user's own."""
        parts = {"model": self.model, "optimizer": self.inner, "trainer": self.trainer}
        return parts | ({"scheduler": self.scheduler} if self.scheduler is not None else {})

    def run(self, epochs: int | None = None) -> Script:
        self.trainer.run(self.loader, max_epochs=epochs or self.case.epochs)
        return self


class Ignite:
    """The trainer, for the laws that all trainers keep."""

    def fit(
        self, case: TrainerCase, folder: Path, *, save_at: Collection[int] = (), resume: Path | None = None
    ) -> Trained:
        script = Script(case)
        trainer, evaluations = script.trainer, list[float]()
        if case.patience:
            evaluator = evaluator_of(script, evaluations)
            trainer.add_event_handler(Events.EPOCH_COMPLETED, evaluator)
        event = Events.ITERATION_COMPLETED(event_filter=lambda _, update: update in save_at)
        if case.dropout:  # Ignite does not save random numbers, and vbs.Checkpoint does
            trainer.add_event_handler(event, lambda: save(script, folder / f"at-{trainer.state.iteration}"))
        else:
            saver = DiskSaver(str(folder), create_dir=True, require_empty=False)
            names = {"filename_pattern": "at-{global_step}", "n_saved": None}
            trainer.add_event_handler(event, Checkpoint(script.parts, saver, **names))
        if resume is not None and case.dropout:
            with own_checkpoint(script, resume) as kept:
                assert kept.restore()
        elif resume is not None:
            Checkpoint.load_objects(script.parts, resume)
        script.run()
        optimizer = trainer.optimizer
        assert trainer.state.iteration == optimizer.updates
        return Trained.of(script.model, optimizer, script.losses, script.rates, evaluations=evaluations)


def own_checkpoint(script: Script, folder: Path) -> vbs.Checkpoint:
    return vbs.Checkpoint(folder, model=script.model, optimizer=script.trainer.optimizer)


def save(script: Script, folder: Path) -> None:
    with own_checkpoint(script, folder) as kept:
        kept.save()


def evaluator_of(script: Script, evaluations: list[float]) -> Any:
    """An evaluation of the first samples after each epoch, which ends a training whose loss does not rise."""
    metric = EpochMetric(lambda y_pred, y: float(cross_entropy(y_pred, y)), check_compute_fn=False)
    evaluator = create_supervised_evaluator(script.model, {"loss": metric})
    loader = DataLoader(Subset(script.case.dataset(), range(EVALUATED)), 50)
    score = {"score_function": lambda engine: engine.state.metrics["loss"], "trainer": script.trainer}
    evaluator.add_event_handler(Events.COMPLETED, EarlyStopping(patience=script.case.patience, **score))
    return lambda: evaluations.append(evaluator.run(loader).metrics["loss"])


def engine_of_texts(
    case: TrainerCase, model: nn.Module, inner: Any, loader: DataLoader[Any], settings: Mapping[str, Any]
) -> VariableBatchEngine:
    """An engine with a step of the user's own, whose loss is a mean over tokens."""
    options = {**settings["optimizer_options"], "reduction": "sum", "model": model}
    optimizer = variable_batch(inner, loader, **{**settings, "optimizer_options": options})

    def train_step(engine: Engine, batch: Any) -> float:
        tokens, labels = batch
        loss, count = case.loss(model(tokens), labels, "sum"), case.count(labels)
        optimizer.backward(loss)
        optimizer.log(loss=loss)
        optimizer.step(count=count)
        return loss.item()

    return VariableBatchEngine(train_step, optimizer)
