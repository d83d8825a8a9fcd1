"""An ordinary script of Ignite around `create_supervised_trainer`, and what its tests run in processes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, RunningAverage
from ignite.metrics import Loss as LossMetric
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import variable_batch_size as vbs
from helpers.trainer_cases import CASES, Case, chosen, expected
from helpers.yardstick import (
    EPOCHS,
    MICROBATCH,
    REF,
    SAMPLES,
    SIZES,
    STOPS,
    TRACE,
    UPDATES,
    Samples,
    difference,
    network,
    samples,
    weights,
)
from variable_batch_size.integrations.ignite import create_supervised_trainer


class Script:
    """An ordinary script of Ignite; `trainer` is what the changed line makes."""

    def __init__(self, case: Case, **options: Any) -> None:
        self.case = case
        self.model = network(case.dropout)
        self.inner = case.make_inner(self.model)
        self.loader = DataLoader(Samples(), batch_size=MICROBATCH, shuffle=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "AdaScale's gain is meant for SGD")
            self.trainer = create_supervised_trainer(
                self.model,
                self.inner,
                cross_entropy,
                loader=self.loader,
                trace=vbs.AdaptiveTrace(chosen, start=24, every=3, delay=5) if case.adaptive else TRACE,
                rule=case.rule,
                ref_batchsize=REF,
                optimizer_options={} if case.clip is None else {"max_grad_norm": case.clip},
                **options,
            )
        self.losses: list[float] = []
        self.epochs: list[tuple[int, int, int]] = []
        trainer = self.trainer
        self.scheduler = case.scheduler(self.inner)
        if self.scheduler is not None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: self.scheduler.step())
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: self.losses.append(trainer.state.output))

        @trainer.on(Events.EPOCH_COMPLETED)
        def note() -> None:
            self.epochs.append((trainer.state.epoch, trainer.state.iteration, trainer.state.epoch_length))

    @property
    def parts(self) -> dict[str, Any]:
        """What is saved: the optimizer is the user's own."""
        parts = {"model": self.model, "optimizer": self.inner, "trainer": self.trainer}
        return parts | ({"scheduler": self.scheduler} if self.scheduler is not None else {})

    def saving(self, folder: Path) -> Script:
        """Save after the updates of `STOPS`."""
        saver = DiskSaver(str(folder), create_dir=True, require_empty=False)
        handler = Checkpoint(self.parts, saver, n_saved=None)
        event = Events.ITERATION_COMPLETED(event_filter=lambda _, update: update in STOPS)
        self.trainer.add_event_handler(event, handler)
        return self

    def restored(self, folder: Path, update: int) -> Script:
        Checkpoint.load_objects(self.parts, folder / f"checkpoint_{update}.pt")
        return self

    def run(self, epochs: int = EPOCHS) -> Script:
        self.trainer.run(self.loader, max_epochs=epochs)
        return self


def check(script: Script) -> None:
    """Compare a whole training, or what a resume has left of it, with the one by hand."""
    wanted, losses = expected(script.case)
    state, trainer = script.trainer.state, script.trainer
    assert difference(script.model, wanted) < 1e-12, script.case
    assert (trainer.optimizer.updates, trainer.optimizer.samples) == (UPDATES, EPOCHS * SAMPLES)
    assert (state.iteration, state.epoch) == (UPDATES, EPOCHS)
    assert script.losses == pytest.approx(losses[-len(script.losses) :], rel=1e-12)
    ends = [(1, 11, 11), (2, 21, 10), (3, 26, 5)]
    assert script.epochs == ends[-len(script.epochs) :]
    if script.scheduler is not None:
        assert script.scheduler.last_epoch == UPDATES


def resumed(case: Case, folder: Path) -> Iterator[Script]:
    """Continue from each of `STOPS`, to the end."""
    for stop in STOPS:
        script = Script(case).restored(folder, stop)
        assert script.trainer.optimizer.updates == stop
        script.run()
        assert len(script.losses) == UPDATES - stop
        yield script


def with_own_checkpoint(case: Case, folder: Path, stop: int | None = None) -> Script:
    """Train with `vbs.Checkpoint` after every update, to the end or to an update; or continue what is in the folder."""
    script = Script(case)
    trainer = script.trainer
    parts = {"scheduler": script.scheduler} if script.scheduler is not None else {}
    with vbs.Checkpoint(folder, model=script.model, optimizer=trainer.optimizer, every=1, **parts) as checkpoint:
        if checkpoint.restore():
            torch.manual_seed(99)  # dropout must not depend on what was drawn before
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: checkpoint.step())
        if stop is not None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), trainer.terminate)
        return script.run()


def dropout_resumes(folder: Path, seed: int) -> None:
    """With dropout, a run that stops and resumes ends with the very weights of one that does not."""
    case = Case(dropout=0.3)
    torch.manual_seed(seed)
    whole = with_own_checkpoint(case, folder / "whole")
    for stop in STOPS:
        torch.manual_seed(seed)
        assert with_own_checkpoint(case, folder / str(stop), stop).trainer.optimizer.updates == stop
        after = with_own_checkpoint(case, folder / str(stop))
        assert after.trainer.state.iteration == UPDATES
        assert difference(after.model, weights(whole.model)) == 0.0, stop


def check_adaptive(folder: Path) -> None:
    """An adaptive trace makes the updates of the trace that it has chosen, also after a resume."""
    whole = Script(Case(adaptive=True)).saving(folder).run()
    updates = whole.trainer.optimizer.updates
    sizes = whole.trainer.optimizer.sampler.trace.batch_sizes(range(updates)).tolist()
    assert len(set(sizes)) > 3
    wanted, _ = expected(Case(), tuple(sizes), updates)
    assert difference(whole.model, wanted) < 1e-12
    ends = [0, *(end for _, end, _ in whole.epochs)]
    assert [length for _, _, length in whole.epochs] == [after - before for before, after in itertools.pairwise(ends)]
    for stop in STOPS:
        if (folder / f"checkpoint_{stop}.pt").exists():
            script = Script(Case(adaptive=True)).restored(folder, stop).run()
            assert script.trainer.state.iteration == updates
            assert difference(script.model, wanted) < 1e-12


def two_processes(folder: Path) -> None:
    """What two processes do; some of it is compared by the test that starts them."""
    for case in CASES:
        check(Script(case).run())
    Script(Case()).saving(folder / "two").run()
    dist.barrier()
    for script in resumed(Case(), folder / "one"):
        check(script)
    dropout_resumes(folder / "dropout", seed=dist.get_rank())
    check_adaptive(folder / "adaptive")
    check_metrics()
    check_data_parallel()


def check_data_parallel() -> None:
    """A model in DistributedDataParallel, as idist.auto_model wraps it, and the loader of a DistributedSampler."""
    case = Case("sgd", "adascale", schedule=False)
    for wrap in DistributedDataParallel, lambda model: model:
        model = wrap(network())
        loader = DataLoader(Samples(), MICROBATCH, sampler=DistributedSampler(Samples()))
        options = {"trace": TRACE, "rule": case.rule, "ref_batchsize": REF}
        trainer = create_supervised_trainer(model, case.make_inner(model), cross_entropy, loader=loader, **options)
        trainer.run(loader, max_epochs=EPOCHS)
        assert difference(model, expected(case)[0]) < 1e-12
        assert trainer.optimizer.sampler.shuffle


def check_metrics() -> None:
    """Metrics of the trainer count each sample once, also in updates that have no microbatch for each rank."""
    case = Case("sgd", "adascale", schedule=False)
    hits: list[float] = []
    script = Script(case, output_transform=lambda x, y, y_pred, loss: (y_pred, y, loss.item()))
    trainer = script.trainer
    metric, accuracy = LossMetric(cross_entropy, output_transform=_pair), Accuracy(output_transform=_pair)
    metric.attach(trainer, "loss")
    accuracy.attach(trainer, "accuracy")
    RunningAverage(output_transform=lambda output: output[2], alpha=1e-9).attach(trainer, "last")
    last: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: last.append(trainer.state.metrics["last"]))
    epochs: list[float] = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: epochs.append(trainer.state.metrics["loss"]))
    script.run()
    _, losses = expected(case)
    assert last == pytest.approx(losses, rel=1e-6)
    for mean, begin, end in zip(epochs, (0, 11, 21), (11, 21, 26), strict=True):
        sizes = SIZES[begin:end]
        sizes[-1] += SAMPLES - sum(sizes)
        wanted = sum(n * loss for n, loss in zip(sizes, losses[begin:end], strict=True)) / SAMPLES
        assert mean == pytest.approx(wanted, rel=1e-6)  # Ignite adds in float32
    assert 0 < trainer.state.metrics["accuracy"] <= 1
    evaluator = create_supervised_evaluator(script.model, {"accuracy": Accuracy()})
    hits.append(evaluator.run([samples()]).metrics["accuracy"])
    assert 0 < hits[0] <= 1


def _pair(output: Any) -> Any:
    return output[0], output[1]
