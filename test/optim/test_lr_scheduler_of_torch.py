"""The schedulers of torch, stepped by reference updates: against a plain training, and resumed in another world."""

from __future__ import annotations

import io
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import OneCycleLR

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import SIZES, Training, training
from helpers.schedules import SCHEDULERS, counter, every_by
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks

every_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)


def hyperparameters(optimizer: Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


@every_scheduler
@pytest.mark.parametrize("of_inner", [False, True], ids=["wrapper", "inner"])
def test_a_scheduler_takes_the_steps_of_a_training_at_the_reference(make: Any, of_inner: bool) -> None:
    run = training(sizes=SIZES, dataset_size=sum(SIZES), ref_batchsize=4)
    inner = make(run.optimizer.inner if of_inner else run.optimizer)
    scheduler = vbs.ProgressScheduler(inner, run.optimizer, "samples")
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], **training().optimizer.defaults)
    twin, taken = make(plain), 0
    for samples in accumulate(SIZES):
        run.run(1)
        scheduler.step()
        for _ in range(samples // 4 - taken):
            plain.step()
            twin.step()
        taken = samples // 4
        assert hyperparameters(run.optimizer) == hyperparameters(plain)
        assert scheduler.get_last_lr() == twin.get_last_lr()


@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize("total_steps", [1, 2, 8])
def test_a_one_cycle_keeps_its_last_value(anneal: Any, total_steps: int) -> None:
    run = training(ref_batchsize=4)
    inner = OneCycleLR(run.optimizer, 0.1, total_steps=total_steps, anneal_strategy=anneal, div_factor=5)
    scheduler = vbs.ProgressScheduler(inner, run.optimizer, "updates")
    rates = scheduler.get_last_lr()
    for _ in range(total_steps + 3):
        run.run(1)
        scheduler.step()
        rates += scheduler.get_last_lr()
    assert rates[total_steps - 1 :] == pytest.approx(5 * [0.1 / 5 / 1e4])
    assert all(rate > 1e-3 for rate in rates[: total_steps - 1])
    assert run.optimizer.param_groups[0]["momentum"] == pytest.approx(0.95)


def test_a_one_cycle_inside_other_schedulers_keeps_its_last_value() -> None:
    run = training(ref_batchsize=4)
    parts = [
        lr_scheduler.ConstantLR(run.optimizer, total_iters=9),
        OneCycleLR(run.optimizer, 0.1, total_steps=3),
        lr_scheduler.ConstantLR(run.optimizer, factor=0.25),
    ]
    phases = lr_scheduler.SequentialLR(run.optimizer, parts, milestones=[2, 7])
    inner = lr_scheduler.ChainedScheduler([phases, lr_scheduler.StepLR(run.optimizer, 100)], run.optimizer)
    scheduler = vbs.ProgressScheduler(inner, run.optimizer, "updates")
    rates = scheduler.get_last_lr()
    for _ in range(9):
        run.run(1)
        scheduler.step()
        rates += scheduler.get_last_lr()
    assert rates[4:7] == pytest.approx(3 * [0.1 / 25 / 1e4])
    assert min(rates[:4] + rates[7:]) > 1e-4


# ------------------------------------------------------------------------------------------------------------ state


@every_by
@every_scheduler
@examples(6)
@given(
    stop=st.integers(0, len(SIZES)),
    minibatch_sizes=st.tuples(st.integers(4, 9), st.integers(4, 9)),  # before and after
    worlds=st.tuples(st.sampled_from([1, 3]), st.sampled_from([1, 2])),
    optimizer_first=st.booleans(),
)
def test_a_schedule_resumes_in_another_world(
    by: Any, make: Any, stop: int, minibatch_sizes: tuple[int, int], worlds: tuple[int, int], optimizer_first: bool
) -> None:
    def start(backend: Backend | None, minibatch_size: int) -> tuple[Training, vbs.ProgressScheduler]:
        run = training(sizes=SIZES, ref_batchsize=6, backend=backend, minibatch_size=minibatch_size)
        return run, vbs.ProgressScheduler(make(run.optimizer), run.optimizer, by, total=25)

    def rates(run: Training, scheduler: vbs.ProgressScheduler, updates: int) -> list[Any]:
        found = []
        for _ in range(updates):
            run.run(1)
            scheduler.step()
            found.append((scheduler.get_last_lr(), hyperparameters(run.optimizer), scheduler.passed, scheduler.done))
        return found

    def save(backend: Backend) -> tuple[list[Any], bytes]:
        run, scheduler = start(backend, minibatch_sizes[0])
        found, file = rates(run, scheduler, stop), io.BytesIO()
        torch.save((run.optimizer.state_dict(), scheduler.state_dict()), file)
        return found, file.getvalue()

    def resume(backend: Backend) -> list[Any]:
        run, scheduler = start(backend, minibatch_sizes[1])
        optimizer_state, scheduler_state = torch.load(io.BytesIO(saved), weights_only=True)
        loads = [(run.optimizer, optimizer_state), (scheduler, scheduler_state)]
        for part, state in loads if optimizer_first else reversed(loads):
            part.load_state_dict(state)
        scheduler.step()
        return rates(run, scheduler, len(SIZES) - stop)

    uninterrupted = rates(*start(None, minibatch_size=4), len(SIZES))
    ((found, saved), *_) = run_ranks(save, worlds[0])
    assert found == uninterrupted[:stop]
    for rank in run_ranks(resume, worlds[1]):
        assert rank == uninterrupted[stop:]


def test_the_state_consists_of_plain_numbers() -> None:
    run = training(vbs.ConstantOptimizer)
    inner = counter(run.optimizer)
    scheduler = vbs.ProgressScheduler(inner, run.optimizer)
    for _ in range(4):
        run.run(1)
        scheduler.step()
    assert scheduler.state_dict() == {
        "by": "progress",
        "steps": 2,
        "updates": 4,
        "progress": 2.0,
        "pending": [[3, 3.0], [4, 4.0]],
        "scheduler": inner.state_dict(),
    }


@pytest.mark.parametrize("state", [{"by": "samples"}, {"last_epoch": 3}])
def test_rejects_a_state_with_another_by(state: dict[str, Any]) -> None:
    run = training()
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer)
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match=r"of a ProgressScheduler with by='progress', got by=.*; create") as error:
        scheduler.load_state_dict(state)
    assert repr(state.get("by")) in str(error.value)
    assert scheduler.state_dict() == before
