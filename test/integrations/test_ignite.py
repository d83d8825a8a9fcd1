"""An ordinary script of Ignite around our trainer, on one process, against a training by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ignite
import pytest
import torch
from datasets import Dataset
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import (
    Checkpoint,
    CosineAnnealingScheduler,
    DiskSaver,
    EarlyStopping,
    LRScheduler,
    PiecewiseLinear,
    create_lr_scheduler_with_warmup,
)
from ignite.metrics import EpochMetric
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from helpers import ignite_jobs as jobs
from helpers.ignite_jobs import Script, check
from helpers.trainer_cases import CASES, Case, expected
from helpers.trainer_examples import run_script
from helpers.yardstick import (
    EPOCHS,
    MICROBATCH,
    REF,
    SAMPLES,
    TRACE,
    UPDATES,
    Samples,
    difference,
    network,
    samples,
)
from variable_batch_size.integrations.ignite import (
    VariableBatchEngine,
    create_supervised_trainer,
    variable_batch,
)

# Against a training by hand. -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.inner}-{case.rule}-{case.clip}")
def test_the_yardstick(case: Case) -> None:
    check(Script(case).run())


def test_resumes_at_five_places(tmp_path: Path) -> None:
    case = Case("sgd", "adascale", clip=0.5)
    Script(case).saving(tmp_path).run()
    for script in jobs.resumed(case, tmp_path):
        check(script)


def test_dropout_resumes_to_the_last_bit(tmp_path: Path) -> None:
    jobs.dropout_resumes(tmp_path, seed=3)


def test_an_adaptive_trace_resumes(tmp_path: Path) -> None:
    jobs.check_adaptive(tmp_path)


def test_metrics_weigh_by_samples() -> None:
    jobs.check_metrics()


# Counting. -------------------------------------------------------------------------------------------------------


def test_epochs_have_unequal_lengths() -> None:
    script = Script(Case())
    lengths: list[int] = []
    trainer = script.trainer
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: lengths.append(trainer.state.epoch_length))
    check(script.run())
    assert lengths == [11] * 11 + [10] * 10 + [5] * 5


def test_a_second_run_continues() -> None:
    script = Script(Case()).run(epochs=1)
    assert script.trainer.optimizer.updates == 11
    script.run(epochs=3)
    check(script)
    script.run(epochs=3)  # nothing is left
    check(script)


@pytest.mark.skipif(TorchVersion(ignite.__version__) < "0.5.5", reason="older ones have no max_iters")
def test_max_iters_are_updates() -> None:
    script = Script(Case())
    script.trainer.run(script.loader, max_iters=14)
    assert (script.trainer.optimizer.updates, script.trainer.state.iteration) == (14, 14)


def test_the_end_of_the_sampler_ends_the_run() -> None:
    script = Script(Case(), sampler_options={"max_updates": 15})
    ends: list[str] = []
    script.trainer.add_event_handler(Events.COMPLETED, lambda: ends.append("completed"))
    script.run()
    assert script.trainer.optimizer.done
    assert script.epochs == [(1, 11, 11), (2, 15, 4)]
    assert ends == ["completed"]
    assert script.run().trainer.state.iteration == 15


def test_terminate_and_run_again() -> None:
    script = Script(Case())
    handle = script.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=14), script.trainer.terminate)
    script.run()
    assert script.trainer.state.iteration == 14
    handle.remove()
    check(script.run())


def test_interrupt_and_continue() -> None:
    script = Script(Case())
    script.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=14), script.trainer.interrupt)
    script.run()
    assert script.trainer.state.iteration == 14
    check(script.run())


def test_early_stopping() -> None:
    script = Script(Case())
    evaluator = create_supervised_evaluator(script.model, {"mse": EpochMetric(lambda y_pred, y: 0.0)})
    stopping = EarlyStopping(
        patience=1, score_function=lambda engine: engine.state.metrics["mse"], trainer=script.trainer
    )
    evaluator.add_event_handler(Events.COMPLETED, stopping)
    script.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(DataLoader(Samples(), 50)))
    script.run(epochs=8)
    assert script.trainer.state.epoch == 2


# Schedules, states. ----------------------------------------------------------------------------------------------


def rates(script: Script, scheduler: Any) -> list[float]:
    found: list[float] = []
    trainer = script.trainer
    trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: found.append(trainer.optimizer.param_groups[0]["lr"]))
    script.run()
    return found


def test_schedulers_of_ignite_count_updates() -> None:
    script = Script(Case("sgd", schedule=False))
    found = rates(script, PiecewiseLinear(script.inner, "lr", [(0, 0.0), (10, 0.1), (25, 0.0)]))
    assert found[:11] == pytest.approx([0.01 * n for n in range(11)])
    assert found[25] == pytest.approx(0.0)
    script = Script(Case("sgd", schedule=False))
    found = rates(script, CosineAnnealingScheduler(script.trainer.optimizer, "lr", 0.1, 0.0, cycle_size=2 * UPDATES))
    assert found[0] == pytest.approx(0.1)
    assert found == sorted(found, reverse=True)
    script = Script(Case("sgd", schedule=False))
    inner = torch.optim.lr_scheduler.StepLR(script.inner, 4, 0.8)
    warm = create_lr_scheduler_with_warmup(LRScheduler(inner), warmup_start_value=0.0, warmup_duration=5)
    found = rates(script, warm)
    assert found[:4] == pytest.approx([0.025 * n for n in range(4)])
    assert found[-1] < found[6]


def test_states_of_every_event_can_be_loaded(tmp_path: Path) -> None:
    """Also that of the end of an epoch, and of the end of the run, where the engine has no epoch_length."""
    for event in Events.EPOCH_COMPLETED, Events.COMPLETED:
        script = Script(Case())
        saver = DiskSaver(str(tmp_path / event.name), create_dir=True)
        script.trainer.add_event_handler(event, Checkpoint(script.parts, saver, n_saved=None))
        script.run()
        for path in sorted((tmp_path / event.name).iterdir()):
            after = Script(Case())
            Checkpoint.load_objects(after.parts, path)
            assert f"checkpoint_{after.trainer.state.iteration}.pt" == path.name
            after.run()
            assert difference(after.model, expected(Case())[0]) < 1e-12


def test_the_optimizer_is_a_part_of_its_own() -> None:
    """The wrapper's state has the position, too."""
    script = Script(Case())
    script.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=14), script.trainer.terminate)
    script.run()
    state = {"model": script.model.state_dict(), "optimizer": script.trainer.optimizer.state_dict()}
    after = Script(Case(schedule=False))
    Checkpoint.load_objects({"model": after.model, "optimizer": after.trainer.optimizer}, state)
    after.run()
    assert (after.trainer.state.iteration, after.trainer.state.epoch) == (UPDATES, EPOCHS)


# What trainers do. -----------------------------------------------------------------------------------------------


def test_bfloat16() -> None:
    model, data = network().float(), Samples()
    data.x = data.x.float()
    loader = DataLoader(data, MICROBATCH, shuffle=True)
    inner = SGD(model.parameters(), lr=0.1)
    optimizer = variable_batch(inner, loader, trace=TRACE, rule="root", ref_batchsize=REF)

    def train_step(engine: Engine, batch: Any) -> float:
        x, target = batch
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = VariableBatchEngine(train_step, optimizer)
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(loader, max_epochs=EPOCHS)
    assert (optimizer.updates, optimizer.samples) == (UPDATES, EPOCHS * SAMPLES)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'", "ignore:.*CUDA is not available")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_datasets_and_stateful_loaders(kind: Any) -> None:
    x, target = samples()
    data = Dataset.from_dict({"x": x.tolist(), "target": target.tolist()}).with_format("torch", dtype=torch.float64)
    model, case = network(), Case("sgd", schedule=False)
    loader = kind(data, batch_size=MICROBATCH, shuffle=True)
    trainer = create_supervised_trainer(
        model,
        case.make_inner(model),
        cross_entropy,
        loader=loader,
        trace=TRACE,
        rule="root",
        ref_batchsize=REF,
        prepare_batch=lambda batch, device, non_blocking: (batch["x"], batch["target"].long()),
    )
    trainer.run(loader, max_epochs=EPOCHS)
    assert difference(model, expected(case)[0]) < 1e-12


def test_a_metric_of_the_trainer_that_keeps_all_outputs() -> None:
    script = Script(Case(), output_transform=lambda x, y, y_pred, loss: (y_pred, y))
    sizes: list[int] = []
    metric = EpochMetric(lambda y_pred, y: sizes.append(len(y)) or 0.5, check_compute_fn=False)
    metric.attach(script.trainer, "kept")
    script.trainer.run(script.loader, max_epochs=2)
    assert sizes == [SAMPLES, SAMPLES]


def test_the_private_attribute_that_a_resume_needs() -> None:
    """`_init_iter` is the number of batches of the epoch that were there before; Ignite takes it in each epoch."""
    seen: list[tuple[int | None, int | None]] = []
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: setattr(engine, "_init_iter", 2))
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append((engine.state.iteration, engine._init_iter)))
    engine.run([1, 2, 3, 4, 5], max_epochs=1)
    assert seen == [(3, None)]


def test_the_example_runs_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_script("ignite_classifier.py", "--epochs", "2", "--folder", str(tmp_path))
    whole = capsys.readouterr().out.splitlines()
    run_script("ignite_classifier.py", "--epochs", "2", "--resume", str(tmp_path / "checkpoint_30.pt"))
    after = capsys.readouterr().out.splitlines()
    assert whole[1:] == after
    assert re.match(r"epoch 2: 40 updates, accuracy 0\.[89]", after[0])
