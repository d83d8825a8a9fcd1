"""Checkpoints on real files: what they bring back, what they refuse, and when they are made."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import threading
from collections import Counter, OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, cut_off, names, start, two_saved
from helpers.reference import SIZES, Training, assert_equal, training
from helpers.xla_checkpoints import restore, save
from helpers.xla_training import Case
from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint import checkpoint as module
from variable_batch_size.checkpoint import rng_states
from variable_batch_size.checkpoint.folder import MANIFEST, STATE
from variable_batch_size.testing import launch, run_ranks

STOP = 3
STATES = {
    "linear": functools.partial(training, vbs.LinearRuleOptimizer),
    "adascale": functools.partial(training, vbs.AdaScaleOptimizer),
    "differenced": functools.partial(training, vbs.AdaScaleOptimizer, noise="differenced"),
    "adam": functools.partial(training, vbs.SqrtSDERuleOptimizer),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return two_saved(tmp_path / "saved")


# --------------------------------------------------------------------------------------------- what is brought back


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 1), (1, 2)])
def test_a_restored_training_is_one_that_never_stopped(state: str, before: int, after: int, tmp_path: Path) -> None:
    def begin(backend: Backend) -> None:
        run = STATES[state](backend=backend).run(STOP)
        with checkpoint(tmp_path, run) as saves:
            saves.save()

    def go_on(backend: Backend) -> Training:
        run = STATES[state](backend=backend).run(1)  # what it has done before is forgotten
        with checkpoint(tmp_path, run) as saves:
            assert saves.restore()
        assert run.optimizer.updates == run.sampler.state_dict()["step"] == STOP
        return run.run(len(SIZES) - STOP)

    run_ranks(begin, before)
    unbroken = STATES[state]().run(len(SIZES))
    for rank in run_ranks(go_on, after):
        assert_equal(rank.weights(), unbroken.weights())
        assert rank.optimizer.progress == pytest.approx(unbroken.optimizer.progress, rel=1e-12)


def test_a_schedule_goes_on_too(tmp_path: Path) -> None:
    def scheduled(run: Training) -> vbs.ProgressScheduler:
        inner = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
        return vbs.ProgressScheduler(inner, run.optimizer, by="samples")

    def train(run: Training, schedule: vbs.ProgressScheduler, updates: int) -> list[float]:
        rates = []
        for _ in range(updates):
            run.run(1)
            schedule.step()
            rates.append(run.optimizer.param_groups[0]["lr"])
        return rates

    unbroken = training()
    expected = train(unbroken, scheduled(unbroken), len(SIZES))
    assert len(set(expected)) > 1
    first = training()
    schedule = scheduled(first)
    rates = train(first, schedule, STOP)
    with checkpoint(tmp_path, first, scheduler=schedule) as saves:
        saves.save()
    second = training()
    schedule = scheduled(second)
    with checkpoint(tmp_path, second, scheduler=schedule) as saves:
        assert saves.restore()
    assert rates + train(second, schedule, len(SIZES) - STOP) == expected
    assert_equal(second.weights(), unbroken.weights())


def test_random_states_come_back_in_a_world_of_the_same_size_only(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), np.random.random(), random.random()

    def seed(number: int) -> None:
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)

    seed(1)
    run = training().run(1)
    with checkpoint(tmp_path, run) as saves:
        saves.save()
        expected = draw()
        saves.restore()
        assert draw() == expected

    def restored(backend: Backend) -> None:
        with checkpoint(tmp_path, training(backend=backend)) as saves:
            seed(2)
            backend.exchange(b"")
            assert saves.restore()

    run_ranks(restored, 2)
    other = draw()
    seed(2)
    assert draw() == other


def test_each_rank_gets_its_own_random_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine: dict[int, Any] = {}  # threads share the generators, so each rank is given other states

    def train(backend: Backend) -> None:
        with checkpoint(tmp_path, training(backend=backend).run(1)) as saves:
            saves.save()
            saves.restore()

    def take(states: str) -> None:
        mine[threading.get_ident()] = states == threading.current_thread().name

    monkeypatch.setattr(rng_states, "current", lambda: threading.current_thread().name)
    monkeypatch.setattr(rng_states, "go_on", take)
    run_ranks(train, 3)
    assert list(mine.values()) == 3 * [True]


def test_all_kinds_of_plain_values_come_back(tmp_path: Path) -> None:
    class Part:
        state: Any = None

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    part, run = Part(), training().run(1)
    plain: dict[Any, Any] = {
        "a": [1, 2.5, (True, None, "text", b"bytes")],
        3: Counter([4, 4]),
        "b": OrderedDict(c=torch.float16, d=torch.Size([2])),
    }
    with checkpoint(tmp_path, run, part=part) as saves:
        part.state = plain
        saves.save()
        part.state = None
        assert saves.restore()
        assert part.state == plain
        assert type(part.state[3]) is Counter
        part.state = {"deep": [0, np.float64(1)]}
        with pytest.raises(RuntimeError, match=r"plain values, but part\['deep'\]\[1\] is a numpy.float64; let"):
            saves.save()
    assert names(tmp_path) == ["update-00000001"]


def test_the_manifest_tells_where_the_training_stood(saved: Path) -> None:
    facts = json.loads((saved / "update-00000002" / MANIFEST).read_text())
    assert {name: facts[name] for name in ("epoch", "step", "samples", "updates")} == {
        **{"epoch": 0, "step": 2, "samples": sum(SIZES[:2]), "updates": 2}
    }
    assert facts["trace"] == training().sampler.fingerprint()["trace"]
    assert facts["file"]["bytes"] == (saved / "update-00000002" / STATE).stat().st_size
    state = torch.load(saved / "update-00000002" / STATE, weights_only=True)
    assert set(state["parts"]) == set(facts["parts"]) == {"model", "optimizer", "sampler"}
    assert state["parts"]["model"]._metadata == training().model.state_dict()._metadata  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------- what does not fit is refused


def test_missing_and_unknown_parts_are_named(saved: Path) -> None:
    run = training()
    weights = [weight.copy() for weight in run.weights()]
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 2)
    with (
        vbs.Checkpoint(saved, model=run.model, optimizer=run.optimizer, scheduler=schedule) as saves,
        pytest.raises(RuntimeError, match="scheduler is not in it and sampler is in it and was not passed; pass what"),
    ):
        saves.restore()
    assert_equal(run.weights(), weights, 0)


def test_another_model_is_refused_before_anything_changes(saved: Path) -> None:
    run = training(model=nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double())
    weights = [weight.copy() for weight in run.weights()]
    with (
        checkpoint(saved, run) as saves,
        pytest.raises(RuntimeError, match=r"0.weight is \(4, 3\) in .*update-00000002 and \(5, 3\) here; make the"),
    ):
        saves.restore()
    assert_equal(run.weights(), weights, 0)
    assert run.optimizer.updates == 0


def test_another_trace_is_refused_before_anything_changes(saved: Path) -> None:
    run = training(sizes=[5, 6])
    weights = [weight.copy() for weight in run.weights()]
    with checkpoint(saved, run) as saves, pytest.raises(RuntimeError, match="only with the samples it was saved with"):
        saves.restore()
    assert_equal(run.weights(), weights, 0)


def test_a_training_from_the_beginning_does_not_follow_later_checkpoints(saved: Path) -> None:
    run = training().run(1)
    with (
        checkpoint(saved, run, keep=1) as saves,
        pytest.raises(RuntimeError, match=r"update-00000002 is there and this training has passed 1 updates; restore"),
    ):
        saves.save()
    assert names(saved) == ["update-00000001", "update-00000002"]


def test_inside_an_accumulation_every_rank_refuses(tmp_path: Path) -> None:
    said = []

    def train(backend: Backend) -> None:
        run = training(backend=backend, minibatch_size=2)
        with checkpoint(tmp_path, run) as saves:
            next(run.turns())
            try:
                saves.save()
            except RuntimeError as error:
                said.append(str(error))

    run_ranks(train, 2)
    assert len(said) == 2
    assert all("must be called between steps" in text for text in said)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("keep", 0), ("keep", 1.5), ("every", 0), ("every", -timedelta(1)), ("model", 3), ("optimizer", 3), ("part", 3)],
)
def test_bad_arguments_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    run = training()
    arguments: dict[str, Any] = {"model": run.model, "optimizer": run.optimizer, name: value}
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be .*; pass"):
        vbs.Checkpoint(tmp_path, **arguments)
    assert names(tmp_path) == []


# ------------------------------------------------------------------------------------------------- when, and how many


def test_the_newest_stay(tmp_path: Path) -> None:
    run = training()
    with checkpoint(tmp_path, run, keep=3) as saves:
        for _ in range(5):
            run.run(1)
            saves.save()
        assert names(tmp_path) == [f"update-0000000{update}" for update in (3, 4, 5)]
    cut_off(tmp_path / "update-00000004")
    with checkpoint(tmp_path, run, keep=3) as saves:
        run.run(1)
        saves.save()  # three that are whole, and the damaged one among them
        assert names(tmp_path) == [f"update-0000000{update}" for update in (3, 4, 5, 6)]
        run.run(1)
        saves.save()
        assert names(tmp_path) == [f"update-0000000{update}" for update in (5, 6, 7)]


def test_the_same_update_can_be_saved_again(tmp_path: Path) -> None:
    run = training().run(1)
    with checkpoint(tmp_path, run, keep=1) as saves:
        first = saves.save()
        run.model[0].weight.data.zero_()  # type: ignore[index, union-attr]
        assert saves.save() == saves.latest != first
        assert names(tmp_path) == ["update-00000001-1"]
        run.model[0].weight.data.fill_(1)  # type: ignore[index, union-attr]
        saves.restore()
        assert not run.weights()[0].any()


@pytest.mark.parametrize("world", [1, 2])
def test_every_so_many_updates(world: int, tmp_path: Path) -> None:
    def train(backend: Backend) -> list[int]:
        run, at = training(backend=backend, minibatch_size=2), []
        with checkpoint(tmp_path, run, every=2) as saves:
            while run.optimizer.updates < 6:
                for _ in run.turns():
                    if saves.step():
                        at.append(run.optimizer.updates)
                    assert not saves.step()
                run.sampler.set_epoch(run.sampler.epoch + 1)
                run.optimizer.set_epoch(run.optimizer.epoch + 1)
        return at

    for at in run_ranks(train, world):
        assert at[:3] == [2, 4, 6]


def test_a_call_inside_an_accumulation_waits_for_the_next_update(tmp_path: Path) -> None:
    run = training(minibatch_size=2)
    with checkpoint(tmp_path, run, every=1) as saves:
        turns = run.turns()
        while not next(turns):
            assert not saves.step()
        next(turns)
        assert run.optimizer.inside_step
        assert not saves.step()  # was due, and nobody called it then
        while not next(turns):
            pass
        assert saves.step()
    assert names(tmp_path) == ["update-00000002"]


def test_every_so_long_on_the_clock_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now: dict[str, float] = {}  # by thread: only rank 0's counts
    monkeypatch.setattr(module.time, "monotonic", lambda: now[threading.current_thread().name])

    def train(backend: Backend) -> list[bool]:
        name, rank = threading.current_thread().name, backend.world.rank
        now[name] = 0.0
        run, saved = training(backend=backend), []
        with checkpoint(tmp_path, run, every=timedelta(seconds=60)) as saves:
            for seconds in (59, 60, 61, 119, 121):
                now[name] = seconds if rank == 0 else 1000 * seconds
                run.run(1)
                saved.append(saves.step())
        return saved

    assert run_ranks(train, 2) == 2 * [[False, True, False, False, True]]


def test_without_every_step_does_nothing(tmp_path: Path) -> None:
    run = training()
    with checkpoint(tmp_path, run) as saves:
        run.run(1)
        assert not saves.step()
    assert names(tmp_path) == []


# ---------------------------------------------------------------------------------------------------- real processes


def test_processes_save_and_restore(tmp_path: Path) -> None:
    script = """
import torch.distributed as dist
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
run = training(backend=vbs.DistributedBackend()).run(3)
torch.manual_seed(rank)
with checkpoint(folder / "saved", run) as saves:
    saves.save()
    expected = torch.rand(())
    run.run(1)
    assert saves.restore()
    assert torch.rand(()) == expected
    assert run.optimizer.updates == 3
    run.run(2)
torch.save(run.weights(), folder / f"{rank}.pt")
dist.destroy_process_group()
"""
    ranks = [start(script, tmp_path, rank) for rank in range(2)]
    for process in ranks:
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
    for rank in range(2):
        assert_equal(torch.load(tmp_path / f"{rank}.pt", weights_only=False), training().run(5).weights())


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")
def test_cores_save_without_compiling_and_another_number_goes_on(tmp_path: Path) -> None:
    case = Case(vbs.AdaScaleOptimizer, SIZES, 4)
    launch(save, (tmp_path, case, STOP), cores=2)
    launch(restore, (tmp_path, case), cores=1)
    compiled, weights = torch.load(tmp_path / "unbroken0.pt")
    restored, stood, resumed = torch.load(tmp_path / "resumed0.pt")
    assert compiled == [0] * STOP
    assert (restored, stood) == (True, STOP)
    unbroken = training(vbs.AdaScaleOptimizer, noise="differenced").run(len(SIZES)).weights()
    for found in (weights, resumed):
        assert_equal([weight.numpy() for weight in found], unbroken)
