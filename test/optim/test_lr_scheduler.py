"""A schedule by reference updates: how many steps it has taken, where it ends, and what it rejects."""

from __future__ import annotations

import copy
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
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import CosineAnnealingLR

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import REF, SIZES, batches, training
from helpers.schedules import SCHEDULERS, counter, every_by, sequential
from variable_batch_size.backend import Backend
from variable_batch_size.optim.lr_scheduler import DELAY
from variable_batch_size.testing import run_ranks

traces = st.lists(st.integers(1, 40), min_size=1, max_size=8)
GENTLE = {"lr": 1e-6, "momentum": 0.9}  # small enough for any factor of a rule


def reference_updates(by: str, sizes: Sequence[int], dataset_size: int, ref: int) -> list[Fraction | float]:
    """Return m after each update of the linear rule, in reference updates."""
    taken = [len(batch) for batch in batches(sizes, dataset_size)]
    if by == "updates":
        return [Fraction(update) for update in range(1, len(sizes) + 1)]
    if by == "samples":
        return [Fraction(samples, ref) for samples in accumulate(taken)]
    progress = accumulate(size / ref for size in taken)
    return [*DELAY * [0.0], *progress][: len(sizes)]


# ---------------------------------------------------------------------------------------------------- number of steps


@every_by
@examples(20)
@given(
    sizes=traces,
    tail=st.integers(0, 40),
    ref=st.integers(1, 60),
    minibatch_size=st.integers(4, 16),
    world=st.sampled_from([1, 3]),
)
def test_the_number_of_steps_is_the_floor_of_the_reference_updates(
    by: Any, sizes: list[int], tail: int, ref: int, minibatch_size: int, world: int
) -> None:
    dataset_size = max(sizes) + tail

    def train(backend: Backend) -> list[tuple[int, float]]:
        options: dict[str, Any] = {"backend": backend, "minibatch_size": minibatch_size, "hyperparameters": GENTLE}
        run = training(vbs.LinearRuleOptimizer, sizes, dataset_size=dataset_size, ref_batchsize=ref, **options)
        inner = counter(run.optimizer)
        scheduler = vbs.ProgressScheduler(inner, run.optimizer, by)
        assert (inner.last_epoch, scheduler.passed) == (0, 0)
        found = []
        for _ in sizes:
            run.run(1)
            scheduler.step()
            found.append((inner.last_epoch, scheduler.passed))
        return found

    expected = [(math.floor(m), float(m)) for m in reference_updates(by, sizes, dataset_size, ref)]
    assert run_ranks(train, world) == world * [expected]


@pytest.mark.parametrize(
    ("size", "steps"), [(3, [0, 0, 1, 1, 1, 2, 2, 3]), (8, [1, 2, 3, 4, 5, 6, 7, 8]), (20, [2, 5, 7, 10, 12, 15])]
)
def test_fractions_carry_over(size: int, steps: list[int]) -> None:
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


def test_reads_the_progress_two_updates_later(monkeypatch: pytest.MonkeyPatch) -> None:
    run = training(vbs.RootRuleOptimizer)
    events: list[tuple[str, int]] = []

    def later() -> Callable[[], float]:
        updates, value = run.optimizer.updates, run.optimizer.progress
        events.append(("keep", updates))

        def read() -> float:
            events.append(("read", updates))
            return value

        return read

    monkeypatch.setattr(run.optimizer, "_progress_later", later)
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer)
    for _ in range(4):
        run.run(1)
        scheduler.step()
    assert events == [
        *(("keep", 0), ("read", 0), ("keep", 1), ("keep", 2)),
        *(("read", 1), ("keep", 3), ("read", 2), ("keep", 4)),
    ]


def test_the_progress_can_be_read_later() -> None:
    run = training().run(2)
    later, present = run.optimizer._progress_later(), run.optimizer.progress
    run.run(1)
    assert later() == present < run.optimizer.progress


@every_by
def test_calls_after_every_microbatch_change_nothing(by: Any) -> None:
    def learning_rates(every_microbatch: bool) -> list[float]:
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

    assert learning_rates(every_microbatch=True) == learning_rates(every_microbatch=False)
    assert len(set(learning_rates(every_microbatch=True))) > 3


def test_an_update_that_a_scaler_skips_does_not_change_the_delay() -> None:
    def learning_rates(every_microbatch: bool) -> list[float]:
        run = training(sizes=SIZES, dataset_size=sum(SIZES), ref_batchsize=5)
        scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        found = []
        for number, indices in enumerate(run.sampler):
            run.optimizer.backward(run.loss(indices) * (math.inf if number == 6 else 1), scaler=scaler)
            updated = scaler.step(run.optimizer)
            scaler.update()
            if updated or every_microbatch:
                scheduler.step()
            if updated:
                found += scheduler.get_last_lr()
        return found

    assert learning_rates(every_microbatch=True) == learning_rates(every_microbatch=False)
    assert len(learning_rates(every_microbatch=True)) == len(SIZES) - 1


def test_moving_the_clock_back_does_not_move_the_schedule_back() -> None:
    run = training(sizes=[10], dataset_size=50, ref_batchsize=4)
    by_samples, by_progress = counter(run.optimizer), counter(run.optimizer)
    schedulers = [
        vbs.ProgressScheduler(by_samples, run.optimizer, "samples"),
        vbs.ProgressScheduler(by_progress, run.optimizer),
    ]
    progress = [0.0, 0.0]
    state = copy.deepcopy(run.optimizer.state_dict())
    for update in range(12):
        if update == 5:
            run.optimizer.load_state_dict(state)
        run.run(1)
        progress.append(run.optimizer.progress)
        for scheduler in schedulers:
            scheduler.step()
        if update != 5:  # at 5, the progress from before that is read without the delay
            assert schedulers[1].passed == progress[update]
    assert by_samples.last_epoch == math.floor(7 * 10 / 4)
    assert by_progress.last_epoch == math.floor(progress[11])


# ------------------------------------------------------------------------------------------------------------ the end


@examples(30)
@given(sizes=traces, total=st.integers(1, 30), ref=st.integers(1, 20))
def test_a_cosine_ends_with_the_training(sizes: list[int], total: int, ref: int) -> None:
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


@every_by
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_hold_their_last_value_after_the_total(name: str, by: Any) -> None:
    run = training(sizes=[40], dataset_size=80, ref_batchsize=30, hyperparameters=GENTLE)
    inner = SCHEDULERS[name](run.optimizer)
    scheduler, groups = vbs.ProgressScheduler(inner, run.optimizer, by, total=5.5), list[dict[str, Any]]()
    for _ in range(14):
        run.run(1)
        scheduler.step()
        if scheduler.done:
            groups.append({key: value for key, value in run.optimizer.param_groups[0].items() if key != "params"})
            assert scheduler.get_last_lr() == [groups[0]["lr"]]
    assert scheduler.state_dict()["steps"] == 5
    assert len(groups) > 5
    assert groups == len(groups) * groups[:1]


def test_the_end_may_be_between_two_steps() -> None:
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


def test_by_progress_done_is_true_after_the_delay() -> None:
    run = training(vbs.ConstantOptimizer)
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, total=2)
    done = []
    for _ in range(5):
        run.run(1)
        scheduler.step()
        done.append(scheduler.done)
    assert done == [False, False, False, True, True]


@every_by
def test_without_a_total_done_is_false(by: Any) -> None:
    run = training(ref_batchsize=1)
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, by)
    run.run(3)
    scheduler.step()
    assert scheduler.done is False


# ----------------------------------------------------------------------------------------------------------- errors


def test_rejects_a_scheduler_that_steps_on_a_metric() -> None:
    run = training()
    plateau = lr_scheduler.ReduceLROnPlateau(run.optimizer)
    with pytest.raises(TypeError, match=r"but ReduceLROnPlateau steps on a metric; call its step\(metric\)"):
        vbs.ProgressScheduler(plateau, run.optimizer)
    inside = sequential(run.optimizer)
    inside._schedulers[1] = plateau  # type: ignore[attr-defined]  # torch does not check later assignments
    nested = lr_scheduler.ChainedScheduler([inside], run.optimizer)
    with pytest.raises(TypeError, match="but ReduceLROnPlateau steps on a metric"):
        vbs.ProgressScheduler(nested, run.optimizer)


def test_rejects_a_scheduler_of_another_optimizer() -> None:
    run, other = training(), training()
    for stranger in (other.optimizer, other.optimizer.inner):
        with pytest.raises(ValueError, match=r"belong to this wrapper .* LambdaLR belongs to another .*; create it"):
            vbs.ProgressScheduler(counter(stranger), run.optimizer)


def test_rejects_other_types_than_a_scheduler_and_a_wrapper() -> None:
    run = training()
    with pytest.raises(TypeError, match=r"must be one of torch.optim.lr_scheduler, got function; create one"):
        vbs.ProgressScheduler(lambda step: 1.0, run.optimizer)  # type: ignore[arg-type]
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer)
    with pytest.raises(TypeError, match=r"must be one of torch.optim.lr_scheduler, got ProgressScheduler; create one"):
        vbs.ProgressScheduler(scheduler, run.optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be the vbs.CustomOptimizer .*, got SGD; pass the wrapper"):
        vbs.ProgressScheduler(counter(run.optimizer), run.optimizer.inner)  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["steps", None, "Samples"])
def test_rejects_an_unknown_by(by: Any) -> None:
    run = training()
    with pytest.raises(ValueError, match=r'^by must be "progress", "samples" or "updates", got .*; pass one') as error:
        vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, by)
    assert repr(by) in str(error.value)


def test_samples_need_a_reference() -> None:
    run = training(vbs.ConstantOptimizer, ref_batchsize=None)
    with pytest.raises(ValueError, match=r'needs an optimizer with a ref_batchsize.*, got one without; .*by="updates"'):
        vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, "samples")


@pytest.mark.parametrize(
    ("total", "error", "range_"),
    [
        *((total, ValueError, "> 0") for total in (0, 0.0)),
        *((total, ValueError, ">= 0") for total in (-1, math.inf, math.nan)),
        *((total, TypeError, ">= 0") for total in (True, "10", np.bool_(True))),
    ],
)
def test_rejects_a_total_that_is_not_a_positive_number(total: Any, error: type[Exception], range_: str) -> None:
    run = training()
    expected = rf"^total must be a finite number {range_}, got .*; pass the .* hold their last value, or omit it$"
    with pytest.raises(error, match=expected):
        vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, total=total)


@pytest.mark.parametrize("total", [np.int64(3), np.float64(3), 3, 3.0, REF])
def test_accepts_any_positive_number_as_total(total: Any) -> None:
    run = training()
    assert not vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, total=total).done
