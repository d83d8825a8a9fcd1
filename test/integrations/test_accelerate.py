"""Accelerate's ordinary loop around `prepare`, on one process, against a training by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from datasets import Dataset
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import variable_batch_size as vbs
from helpers import accelerate_jobs as jobs
from helpers.accelerate_jobs import Loop, check, ordinary, trained
from helpers.trainer_cases import CASES, Case, expected
from helpers.trainer_examples import run_script
from helpers.yardstick import (
    EPOCHS,
    MICROBATCH,
    SAMPLES,
    TRACE,
    UPDATES,
    Samples,
    difference,
    network,
    samples,
    weights,
)
from variable_batch_size.integrations.accelerate import prepare

pytestmark = pytest.mark.usefixtures("new_state")


# Against a training by hand. -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.inner}-{case.rule}-{case.clip}")
def test_the_yardstick(case: Case) -> None:
    loop = trained(case).run()
    check(loop)
    assert loop.syncs == UPDATES


def test_resumes_at_five_places(tmp_path: Path) -> None:
    case = Case("sgd", "adascale", clip=0.5)
    trained(case).run(jobs.at(tmp_path))
    for _, loop in jobs.resumed(case, tmp_path):
        check(loop)


def test_dropout_resumes_to_the_last_bit(tmp_path: Path) -> None:
    case = Case(dropout=0.3)
    torch.manual_seed(3)
    whole = trained(case).run(jobs.at(tmp_path))
    for stop, loop in jobs.resumed(case, tmp_path):
        assert difference(loop.model, weights(whole.model)) == 0.0, stop


def test_an_adaptive_trace_resumes(tmp_path: Path) -> None:
    whole = Loop(Case(adaptive=True)).run(jobs.at(tmp_path), until=10**9)
    updates = whole.optimizer.updates
    sizes = whole.optimizer.sampler.trace.batch_sizes(range(updates)).tolist()
    wanted, _ = expected(Case(), tuple(sizes), updates)
    assert difference(whole.model, wanted) < 1e-12
    for stop in jobs.STOPS:
        loop = Loop(Case(adaptive=True))
        loop.accelerator.load_state(str(tmp_path / f"at-{stop}"))
        loop.run(until=10**9)
        assert loop.optimizer.updates == updates
        assert difference(loop.model, wanted) < 1e-12


def test_the_loop_may_be_left_within_an_update() -> None:
    """The next loop begins that update again."""
    loop = Loop(Case())
    for x, target in loop.loader:
        loop.accelerator.backward(cross_entropy(loop.model(x), target))
        loop.optimizer.log(loss=0.0)
        loop.optimizer.step()
        assert not loop.accelerator.sync_gradients
        break
    assert loop.accelerator.sync_gradients
    check(loop.run())


# What accelerators do. -------------------------------------------------------------------------------------------


def test_bfloat16() -> None:
    loop = Loop(Case(), settings={"cpu": True, "mixed_precision": "bf16"})
    loop.model.float()
    loop.dataset.x = loop.dataset.x.float()
    loop.run()
    assert loop.optimizer.updates == UPDATES
    assert loop.optimizer.samples == EPOCHS * SAMPLES
    assert loop.losses[-1] < loop.losses[0]


def test_an_overflow_skips_the_update_and_the_scheduler() -> None:
    """With a GradScaler, as "fp16" brings one on an accelerator; the overflow is in the third update."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = network()
    inner = SGD(model.parameters(), lr=0.1)
    objects = model, inner, DataLoader(Samples(), MICROBATCH, shuffle=True), StepLR(inner, 1, 0.9)
    model, optimizer, loader, scheduler = prepare(accelerator, *objects, trace=TRACE)
    skipped = []
    for x, target in loader:
        loss = cross_entropy(model(x), target)
        accelerator.backward(loss * torch.inf if optimizer.updates == 2 else loss)
        optimizer.step()
        if accelerator.sync_gradients:
            skipped.append(accelerator.optimizer_step_was_skipped)
        scheduler.step()
    assert [number for number, skip in enumerate(skipped) if skip] == [2]
    assert scheduler.scheduler.last_epoch == len(skipped) - 1
    assert accelerator.scaler.get_scale() < 8


def test_the_scaler_changes_nothing_else() -> None:
    loop = Loop(Case("sgd", schedule=False))
    loop.accelerator.scaler = loop.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    check(loop.run())


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_datasets_and_stateful_loaders(kind: Any) -> None:
    x, target = samples()
    data = Dataset.from_dict({"x": x.tolist(), "target": target.tolist()}).with_format("torch", dtype=torch.float64)
    data = data.map(lambda row: {"target": row["target"]})
    accelerator, model = Accelerator(cpu=True), network()
    inner = Case("sgd", schedule=False).make_inner(model)
    loader = kind(data, batch_size=MICROBATCH, shuffle=True)
    model, optimizer, loader = prepare(accelerator, model, inner, loader, trace=TRACE, rule="root", ref_batchsize=16)
    assert isinstance(loader.loader, kind)
    for _ in range(EPOCHS):
        for batch in loader:
            accelerator.backward(cross_entropy(model(batch["x"]), batch["target"].long()))
            optimizer.step()
    assert difference(model, expected(Case("sgd", schedule=False))[0]) < 1e-12


def test_a_loop_that_was_interrupted_is_saved(tmp_path: Path) -> None:
    """`except KeyboardInterrupt` within an update: what is accumulated is discarded, as the message says."""
    loop = Loop(Case())
    with pytest.raises(KeyboardInterrupt):
        loop.run(lambda updates: (_ for _ in ()).throw(KeyboardInterrupt) if updates == 13 else None)
    x, target = next(microbatches := iter(loop.loader))
    loop.accelerator.backward(cross_entropy(loop.model(x), target))
    loop.optimizer.log(loss=0.0)
    loop.optimizer.step()
    microbatches.close()
    with pytest.raises(RuntimeError, match=r"must be called between steps.* or call discard_step\(\) first"):
        loop.accelerator.save_state(str(tmp_path / "state"))
    loop.optimizer.discard_step()
    loop.accelerator.save_state(str(tmp_path / "state"))
    loop = Loop(Case())
    loop.accelerator.load_state(str(tmp_path / "state"))
    check(loop.run())


def test_workers() -> None:
    loop = Loop(Case())
    inner = loop.loader.loader
    loop.loader.loader = type(inner)(inner.dataset, batch_sampler=inner.batch_sampler, num_workers=1)
    check(loop.run())


class Journal(GeneralTracker):  # type: ignore[misc]
    """A tracker that keeps the rows."""

    name = "journal"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    @property
    def tracker(self) -> Any:
        return self.rows

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.rows.append({"step": step, **values})


def test_trackers_log_by_update() -> None:
    journal = Journal()
    loop = Loop(Case("sgd", clip=0.5), settings={"cpu": True, "log_with": journal})
    loop.accelerator.init_trackers("project")
    for x, target in loop.loader:
        loss = cross_entropy(loop.model(x), target)
        loop.accelerator.backward(loss)
        size = loop.optimizer.microbatch.batch_size
        if loop.optimizer.step():
            norm = float(loop.optimizer.grad_norm)
            values = {"lr": loop.optimizer.current_lr(), "batch_size": size, "grad_norm": norm}
            loop.accelerator.log(values, step=loop.optimizer.updates)
            loop.scheduler.step()
    assert [row["step"] for row in journal.rows] == [*range(1, 12)]
    assert journal.rows[0]["lr"] == pytest.approx(0.1 * (24 / 16) ** 0.5)
    assert [row["batch_size"] for row in journal.rows[:4]] == [24, 24, 24, 10]
    assert json.dumps(journal.rows)


def test_registered_objects_and_one_process_file(tmp_path: Path) -> None:
    loop = Loop(Case())
    loop.run(until=5)
    kept = vbs.ProgressScheduler(StepLR(loop.optimizer.inner, 5), loop.optimizer.optimizer, by="updates")
    loop.accelerator.register_for_checkpointing(kept)
    loop.accelerator.save_state(str(tmp_path / "state"))
    assert (tmp_path / "state" / "custom_checkpoint_0.pkl").exists()
    loop.accelerator.load_state(str(tmp_path / "state"))
    assert loop.optimizer.updates == 5


def test_evaluation_within_an_epoch() -> None:
    """Its loader is Accelerate's own, and the training continues where it was."""
    accelerator, model = Accelerator(cpu=True), network()
    inner = Case("sgd").make_inner(model)
    scheduler = Case("sgd").scheduler(inner)
    train, test = DataLoader(Samples(), MICROBATCH, shuffle=True), DataLoader(Samples(), 50)
    objects = prepare(accelerator, model, inner, train, test, scheduler, trace=TRACE, rule="root", ref_batchsize=16)
    model, optimizer, train, test, scheduler = objects
    for _ in range(EPOCHS):
        for x, target in train:
            accelerator.backward(cross_entropy(model(x), target))
            updated = optimizer.step()
            scheduler.step()
            if updated and optimizer.updates % 4 == 0:
                with torch.no_grad():
                    seen = [accelerator.gather_for_metrics(target) for _, target in test]
                assert len(torch.cat(seen)) == SAMPLES
                assert accelerator.sync_gradients
    assert difference(model, expected(Case("sgd"))[0]) < 1e-12


def test_what_accelerate_knows_of_the_objects() -> None:
    """Its own mark of prepared objects, which is private, lets it register ours."""
    loop = Loop(Case())
    assert loop.accelerator._optimizers == [loop.optimizer]
    assert loop.accelerator._schedulers == [loop.scheduler]
    assert loop.accelerator._models == [loop.model]
    assert loop.accelerator.prepare(loop.optimizer, loop.loader) == (loop.optimizer, loop.loader)
    assert isinstance(loop.accelerator, Accelerator)
    assert loop.accelerator.unwrap_model(loop.model) is loop.model
    hooks: list[int] = []
    loop.optimizer.register_step_post_hook(lambda *_: hooks.append(1))
    loop.run(until=3)
    assert len(hooks) == 3


def test_another_training_after_free_memory() -> None:
    loop = Loop(Case())
    with pytest.raises(RuntimeError, match=r"prepare\(\) must be called once .*accelerator.free_memory\(\)"):
        prepare(loop.accelerator, *ordinary(), trace=TRACE)
    loop.accelerator.free_memory()
    loop.accelerator.gradient_accumulation_steps = 2  # what follows may be a plain training, too
    with loop.accelerator.accumulate(loop.model):
        assert not loop.accelerator.sync_gradients
    loop.accelerator.gradient_accumulation_steps = 1
    _, optimizer, loader = prepare(loop.accelerator, *ordinary(), trace=TRACE)
    assert (optimizer.updates, len(loader)) == (0, 31)


def test_the_example_runs_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = run_example("accelerate_classifier.py", capsys, "--epochs", "2")
    assert run_example("accelerate_classifier.py", capsys, "--epochs", "1", "--folder", str(tmp_path))
    assert (
        run_example("accelerate_classifier.py", capsys, "--epochs", "2", "--folder", str(tmp_path), "--resume") == last
    )
    assert re.match(r"epoch 1: 40 updates, accuracy 0\.[89]", last)


def run_example(name: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The last line that the script prints."""
    jobs.reset()
    run_script(name, *flags)
    return capsys.readouterr().out.splitlines()[-1]
