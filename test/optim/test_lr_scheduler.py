"""A schedule by reference updates: how many steps it has taken, where it ends, and what it rejects."""

import copy
import io
import math
from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import SIZES, batches, training
from helpers.schedules import SCHEDULERS, counter, every_by
from variable_batch_size.optim.beside.lr_scheduler import DELAY
from variable_batch_size.testing import run_ranks

traces = st.lists(st.integers(1, 40), min_size=1, max_size=8)
GENTLE = {"lr": 1e-6, "momentum": 0.9}  # small enough for any factor of a rule


def reference_updates(by, sizes, dataset_size, ref):
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
def test_the_number_of_steps_is_the_floor_of_the_reference_updates(by, sizes, tail, ref, minibatch_size, world):
    dataset_size = max(sizes) + tail

    def train(backend):
        options = {"backend": backend, "minibatch_size": minibatch_size, "hyperparameters": GENTLE}
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


def test_samples_are_counted_without_rounding():
    run = training(sizes=[1], ref_batchsize=10)
    inner = counter(run.optimizer)
    scheduler = vbs.ProgressScheduler(inner, run.optimizer, "samples", total=1)
    run.run(10)
    scheduler.step()
    assert run.optimizer.progress < 1  # a sum of ten floats
    assert (inner.last_epoch, scheduler.done) == (1, True)


@every_by
def test_calls_after_every_microbatch_change_nothing(by):
    def learning_rates(every_microbatch):
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


def test_moving_the_clock_back_does_not_move_the_schedule_back():
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
def test_a_cosine_ends_with_the_training(sizes, total, ref):
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


# The schedulers of torch, against a plain training, and resumed in another world. -------------------------------------


every_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)


def hyperparameters(optimizer):
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


@every_scheduler
@pytest.mark.parametrize("of_inner", [False, True], ids=["wrapper", "inner"])
def test_a_scheduler_takes_the_steps_of_a_training_at_the_reference(make, of_inner):
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
def test_a_one_cycle_keeps_its_last_value(anneal, total_steps):
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


def test_a_one_cycle_inside_other_schedulers_keeps_its_last_value():
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
def test_a_schedule_resumes_in_another_world(by, make, stop, minibatch_sizes, worlds, optimizer_first):
    def start(backend, minibatch_size):
        run = training(sizes=SIZES, ref_batchsize=6, backend=backend, minibatch_size=minibatch_size)
        return run, vbs.ProgressScheduler(make(run.optimizer), run.optimizer, by, total=25)

    def rates(run, scheduler, updates):
        found = []
        for _ in range(updates):
            run.run(1)
            scheduler.step()
            found.append((scheduler.get_last_lr(), hyperparameters(run.optimizer), scheduler.passed, scheduler.done))
        return found

    def save(backend):
        run, scheduler = start(backend, minibatch_sizes[0])
        found, file = rates(run, scheduler, stop), io.BytesIO()
        torch.save((run.optimizer.state_dict(), scheduler.state_dict()), file)
        return found, file.getvalue()

    def resume(backend):
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


@pytest.mark.parametrize("state", [{"by": "samples"}, {"last_epoch": 3}])
def test_rejects_a_state_with_another_by(state):
    run = training()
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer)
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match=r"from a ProgressScheduler with by='progress', got by=.*; create") as error:
        scheduler.load_state_dict(state)
    assert repr(state.get("by")) in str(error.value)
    assert scheduler.state_dict() == before


def test_a_save_before_the_step_of_the_schedule_warns():
    run = training()
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer)
    scheduler.state_dict()
    run.run(1)
    with pytest.warns(UserWarning, match=r"not called after update 1, .*; call scheduler\.step\(\) before you save"):
        scheduler.state_dict()
    scheduler.step()
    scheduler.state_dict()


def test_a_save_after_a_skipped_update_does_not_warn():
    """Its `step()` is False, so that the loop calls no step of the schedule, which the next update's catches up."""
    run = training(sizes=(4,), minibatch_size=4, skip_grad_norm=1e-9)
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer)
    for indices in run.microbatches(3):
        if run.step(indices):
            scheduler.step()
    assert run.optimizer.skipped == 2  # the first one is never skipped
    states = [part.state_dict() for part in (run.optimizer, scheduler)]
    run = training(sizes=(4,), minibatch_size=4, skip_grad_norm=1e-9)
    scheduler = vbs.ProgressScheduler(counter(run.optimizer), run.optimizer)
    for part, state in zip((run.optimizer, scheduler), states, strict=True):
        part.load_state_dict(state)
    scheduler.state_dict()  # of a run that has just resumed
