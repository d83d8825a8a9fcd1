"""Schedules that are read at reference updates: any torch scheduler, any trace, any world, stopped anywhere."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import variable_batch_size as vbs
from helpers.reference import REF, SIZES, Training, batches, examples, training
from variable_batch_size.backend import Backend
from variable_batch_size.optim.lr_scheduler import DELAY
from variable_batch_size.testing import run_ranks

every_by = pytest.mark.parametrize("by", ["progress", "samples", "updates"])
traces = st.lists(st.integers(1, 40), min_size=1, max_size=8)
GENTLE = {"lr": 1e-6, "momentum": 0.9}  # whatever factor a rule gives


def counter(optimizer: Optimizer) -> LambdaLR:
    """Its `last_epoch` is the number of steps that it has taken."""
    return LambdaLR(optimizer, lambda step: 1 / (step + 1))


def measures(by: str, sizes: Sequence[int], dataset_size: int, ref: int) -> list[Fraction | float]:
    """m after each update, in the linear rule's reference updates."""
    taken = [len(batch) for batch in batches(sizes, dataset_size)]
    if by == "updates":
        return [Fraction(update) for update in range(1, len(sizes) + 1)]
    if by == "samples":
        return [Fraction(samples, ref) for samples in accumulate(taken)]
    gains = [size / ref for size in taken]
    return [*DELAY * [0.0], *accumulate(gains)][: len(sizes)]


# ------------------------------------------------------------------------------------------------------ the measure


@every_by
@examples(20)
@given(
    sizes=traces,
    tail=st.integers(0, 40),
    ref=st.integers(1, 60),
    minibatch_size=st.integers(4, 16),
    world=st.sampled_from([1, 3]),
)
def test_the_schedule_has_taken_the_floor_of_the_measure(
    by: Any, sizes: list[int], tail: int, ref: int, minibatch_size: int, world: int
) -> None:
    dataset_size = max(sizes) + tail

    def train(backend: Backend) -> list[tuple[int, float]]:
        options: dict[str, Any] = {"backend": backend, "minibatch_size": minibatch_size, "hyperparameters": GENTLE}
        run = training(vbs.LinearRuleOptimizer, sizes, dataset_size, ref_batchsize=ref, **options)
        inner = counter(run.optimizer)
        scheduler = vbs.ProgressScheduler(inner, run.optimizer, by)
        assert (inner.last_epoch, scheduler.passed) == (0, 0)
        found = []
        for _ in sizes:
            run.run(1)
            scheduler.step()
            found.append((inner.last_epoch, scheduler.passed))
        return found

    expected = [(math.floor(m), float(m)) for m in measures(by, sizes, dataset_size, ref)]
    assert run_ranks(train, world) == world * [expected]


@pytest.mark.parametrize(
    ("size", "steps"), [(3, [0, 0, 1, 1, 1, 2, 2, 3]), (8, [1, 2, 3, 4, 5, 6, 7, 8]), (20, [2, 5, 7, 10, 12, 15])]
)
def test_fractions_are_carried_over(size: int, steps: list[int]) -> None:
    run = training(sizes=[size], dataset_size=size, ref_batchsize=8)
    inner = counter(run.optimizer)
    scheduler = vbs.ProgressScheduler(inner, run.optimizer, "samples")
    found = []
    for _ in steps:
        run.run(1)
        scheduler.step()
        found.append(inner.last_epoch)
    assert found == steps


def test_samples_are_counted_without_rounding() -> None:
    run = training(sizes=[1], ref_batchsize=10)
    inner = counter(run.optimizer)
    scheduler = vbs.ProgressScheduler(inner, run.optimizer, "samples", total=1)
    run.run(10)
    scheduler.step()
    assert run.optimizer.progress < 1  # a sum of ten floats
    assert (inner.last_epoch, scheduler.done) == (1, True)


def test_the_progress_is_read_two_updates_after_it_was_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = training(vbs.RootRuleOptimizer)
    events: list[tuple[str, int]] = []

    def later() -> Callable[[], float]:
        noted, value = run.optimizer.updates, run.optimizer.progress
        events.append(("note", noted))

        def read() -> float:
            events.append(("read", noted))
            return value

        return read

    monkeypatch.setattr(run.optimizer, "progress_later", later)
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer)
    for _ in range(4):
        run.run(1)
        scheduler.step()
    assert events == [
        *(("note", 0), ("read", 0), ("note", 1), ("note", 2)),
        *(("read", 1), ("note", 3), ("read", 2), ("note", 4)),
    ]


def test_the_progress_can_be_read_later() -> None:
    run = training().run(2)
    later, noted = run.optimizer.progress_later(), run.optimizer.progress
    run.run(1)
    assert later() == noted < run.optimizer.progress


@every_by
def test_calls_after_every_microbatch_change_nothing(by: Any) -> None:
    def rates(every_microbatch: bool) -> list[float]:
        run = training(sizes=SIZES, dataset_size=sum(SIZES), ref_batchsize=5)
        scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, by)
        found = []
        scheduler.step()
        for updated in run.steps():
            if updated or every_microbatch:
                scheduler.step()
            if updated:
                found += scheduler.get_last_lr()
        return found

    assert rates(True) == rates(False)
    assert len(set(rates(True))) > 3


def test_an_update_that_a_scaler_skips_leaves_the_delay_as_it_is() -> None:
    def rates(every_microbatch: bool) -> list[float]:
        run = training(sizes=SIZES, dataset_size=sum(SIZES), ref_batchsize=5)
        scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        found = []
        for number, indices in enumerate(run.sampler):
            scaler.scale(run.loss(indices) * (math.inf if number == 6 else 1)).backward()
            updated = scaler.step(run.optimizer)
            scaler.update()
            if updated or every_microbatch:
                scheduler.step()
            if updated:
                found += scheduler.get_last_lr()
        return found

    assert rates(True) == rates(False)
    assert len(rates(True)) == len(SIZES) - 1


def test_a_clock_that_is_set_back_leaves_the_schedule_where_it_is() -> None:
    run = training(sizes=[10], dataset_size=50, ref_batchsize=4)
    by_samples, by_progress = counter(run.optimizer), counter(run.optimizer)
    schedulers = [
        vbs.ProgressScheduler(by_samples, run.optimizer, "samples"),
        vbs.ProgressScheduler(by_progress, run.optimizer),
    ]
    progress = [0.0, 0.0]
    for update in range(12):
        if update == 5:
            run.sampler.set_epoch(0)
            run.optimizer.set_epoch(0)
        run.run(1)
        progress.append(run.optimizer.progress)
        for scheduler in schedulers:
            scheduler.step()
        if update != 5:  # where what is left of the time before is read at once
            assert schedulers[1].passed == progress[update]
    assert by_samples.last_epoch == math.floor(7 * 10 / 4)
    assert by_progress.last_epoch == math.floor(progress[11])


# -------------------------------------------------------------------------------------------------- where it ends


@examples(30)
@given(sizes=traces, total=st.integers(1, 30), ref=st.integers(1, 20))
def test_a_cosine_ends_where_the_training_ends(sizes: list[int], total: int, ref: int) -> None:
    run = training(sizes=sizes, ref_batchsize=ref, hyperparameters=GENTLE, minibatch_size=16)
    inner = CosineAnnealingLR(run.optimizer, T_max=total, eta_min=1e-9)
    scheduler = vbs.ProgressScheduler(inner, run.optimizer, "samples", total=total)
    while not scheduler.done:
        assert run.optimizer.samples < total * ref
        assert scheduler.get_last_lr()[0] > 1e-9
        run.run(1)
        scheduler.step()
    assert run.optimizer.samples >= total * ref
    assert scheduler.get_last_lr() == pytest.approx([1e-9], rel=1e-6)
    run.run(1)
    scheduler.step()
    assert inner.last_epoch == total


def test_the_end_may_lie_between_two_steps() -> None:
    run = training(sizes=[2], dataset_size=40, ref_batchsize=4)
    inner = counter(run.optimizer)
    scheduler = vbs.ProgressScheduler(inner, run.optimizer, "samples", total=2.5)
    done = []
    for _ in range(8):
        run.run(1)
        scheduler.step()
        done.append(scheduler.done)
    assert done == 4 * [False] + 4 * [True]
    assert inner.last_epoch == 2


def test_the_end_by_progress_is_seen_after_the_delay() -> None:
    run = training(vbs.ConstantOptimizer)
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, total=2)
    done = []
    for _ in range(5):
        run.run(1)
        scheduler.step()
        done.append(scheduler.done)
    assert done == [False, False, False, True, True]


@every_by
def test_without_a_total_nothing_is_done(by: Any) -> None:
    run = training(ref_batchsize=1)
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, by)
    run.run(3)
    scheduler.step()
    assert scheduler.done is False


# ------------------------------------------------------------------------------------------------- torch's schedulers


def sequential(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.8), lr_scheduler.StepLR(optimizer, 2)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


SCHEDULERS: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "LambdaLR": counter,
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4]),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.05, step_size_up=2),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.1, total_steps=60),
}
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


def test_a_one_cycle_inside_others_keeps_its_last_value() -> None:
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
    before=st.tuples(st.integers(4, 9), st.sampled_from([1, 3])),
    after=st.tuples(st.integers(4, 9), st.sampled_from([1, 2])),
    optimizer_first=st.booleans(),
)
def test_a_schedule_goes_on_in_another_world(
    by: Any, make: Any, stop: int, before: tuple[int, int], after: tuple[int, int], optimizer_first: bool
) -> None:
    def begin(backend: Backend | None, minibatch_size: int) -> tuple[Training, vbs.ProgressScheduler]:
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
        run, scheduler = begin(backend, before[0])
        found, file = rates(run, scheduler, stop), io.BytesIO()
        torch.save((run.optimizer.state_dict(), scheduler.state_dict()), file)
        return found, file.getvalue()

    def go_on(backend: Backend) -> list[Any]:
        run, scheduler = begin(backend, after[0])
        optimizer_state, state = torch.load(io.BytesIO(saved), weights_only=True)
        for whole, part in ((run.optimizer, optimizer_state), (scheduler, state))[:: 1 if optimizer_first else -1]:
            whole.load_state_dict(part)
        scheduler.step()
        return rates(run, scheduler, len(SIZES) - stop)

    unbroken = rates(*begin(None, 4), len(SIZES))
    ((found, saved), *_) = run_ranks(save, before[1])
    assert found == unbroken[:stop]
    for rank in run_ranks(go_on, after[1]):
        assert rank == unbroken[stop:]


def test_the_state_is_plain_numbers_without_a_world() -> None:
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
def test_a_state_that_counts_something_else_is_refused(state: dict[str, Any]) -> None:
    run = training()
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer)
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match=r"must count what goes on here, by='progress', got by=.*; make this") as error:
        scheduler.load_state_dict(state)
    assert repr(state.get("by")) in str(error.value)
    assert scheduler.state_dict() == before


# --------------------------------------------------------------------------------------------------------- refusals


def test_a_scheduler_that_steps_on_a_metric_is_refused() -> None:
    run = training()
    plateau = lr_scheduler.ReduceLROnPlateau(run.optimizer)
    with pytest.raises(TypeError, match=r"but ReduceLROnPlateau steps on a metric; call its own step\(metric\)"):
        vbs.ProgressScheduler(plateau, run.optimizer)
    inside = sequential(run.optimizer)
    inside._schedulers[1] = plateau  # type: ignore[attr-defined]  # where torch does not look
    nested = lr_scheduler.ChainedScheduler([inside], run.optimizer)
    with pytest.raises(TypeError, match="but ReduceLROnPlateau steps on a metric"):
        vbs.ProgressScheduler(nested, run.optimizer)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    run, other = training(), training()
    for stranger in (other.optimizer, other.optimizer.inner):
        with pytest.raises(ValueError, match=r"must belong to the wrapper .* LambdaLR belongs to another .*; make it"):
            vbs.ProgressScheduler(counter(stranger), run.optimizer)


def test_what_is_no_scheduler_or_no_wrapper_is_refused() -> None:
    run = training()
    with pytest.raises(TypeError, match=r"must be one of torch.optim.lr_scheduler, got function; make one"):
        vbs.ProgressScheduler(lambda step: 1.0, run.optimizer)  # type: ignore[arg-type]
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer)
    with pytest.raises(TypeError, match=r"must be one of torch.optim.lr_scheduler, got ProgressScheduler; make one"):
        vbs.ProgressScheduler(scheduler, run.optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be the vbs.CustomOptimizer .*, got SGD; pass the wrapper"):
        vbs.ProgressScheduler(counter(run.optimizer), run.optimizer.inner)  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["steps", None, "Samples"])
def test_an_unknown_measure_is_refused(by: Any) -> None:
    run = training()
    with pytest.raises(ValueError, match=r'^by must be "progress", "samples" or "updates", got .*; pass one') as error:
        vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, by)
    assert repr(by) in str(error.value)


def test_samples_need_a_reference() -> None:
    run = training(vbs.ConstantOptimizer)
    with pytest.raises(ValueError, match=r'needs an optimizer with a ref_batchsize.*, got one without; .*by="updates"'):
        vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, "samples")


@pytest.mark.parametrize("total", [0, -1, True, math.inf, math.nan, "10", np.bool_(True), 0.0])
def test_a_total_that_is_no_length_is_refused(total: Any) -> None:
    run = training()
    with pytest.raises(ValueError, match=r"^total must be a finite number > 0, got .*; pass the length"):
        vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, total=total)


@pytest.mark.parametrize("total", [np.int64(3), np.float64(3), 3, 3.0, REF])
def test_a_total_is_any_number(total: Any) -> None:
    run = training()
    assert not vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, total=total).done
