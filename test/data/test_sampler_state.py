"""The sampler's position: resuming, set_epoch, and its state."""

from __future__ import annotations

import copy
import json
import linecache
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.runs import LoggedTraining, Sampling, minibatch_sizes, samplings, sizes, together
from variable_batch_size.adaptive import AdaptiveTrace, PerDevice
from variable_batch_size.testing import run_ranks
from variable_batch_size.world import World

CASE = Sampling(vbs.BatchTrace.from_sizes([7, 3, 12, 1, 5], on_end="cycle"), 40, 4, False, True, seed=3, epochs=4)


# -------------------------------------------------------------------------------- law 5: stop anywhere, resume anywhere


@given(samplings(largest_dataset=60), st.data())
@examples(50)
def test_resumes_at_any_update_in_any_world(case, data):
    """With other objects, another world and another microbatch, in whatever order the states are loaded."""
    stop = data.draw(st.integers(0, len(case.steps)), label="stop")
    size, then = (data.draw(st.integers(1, 3), label="world") for _ in range(2))
    minibatch_size, fixed_shape = data.draw(minibatch_sizes), data.draw(st.booleans())
    loads = data.draw(st.sampled_from([["optimizer"], ["optimizer", "sampler"], ["sampler", "optimizer"]]))
    other = replace(case, fixed_shape=fixed_shape)

    def begin(backend):
        run = LoggedTraining(case, backend).train(updates=stop)
        sampler = json.loads(json.dumps(run.sampler.state_dict()))
        return run, {"optimizer": copy.deepcopy(run.optimizer.state_dict()), "sampler": sampler}

    def resume(backend):
        run = LoggedTraining(other, backend, minibatch_size)
        for name in loads:
            getattr(run, name).load_state_dict(states[0][name])
        assert run.optimizer.updates == stop
        assert run.sampler.plan.fixed_shape == case.fixed_shape  # the saved cut wins
        return run.train()

    begun, states = zip(*run_ranks(begin, size), strict=True)
    assert all(state == states[0] for state in states)
    first = together(run.log for run in begun)
    assert first == case.steps[:stop]
    assert first + together(run.log for run in run_ranks(resume, then)) == case.steps


@given(samplings(largest_dataset=60), st.data())
@examples(100)
def test_the_future_of_the_trace_may_change(case, data):
    """What is over stays as it was: also where the new sizes would have ended the epoch elsewhere.

    The end of the training may also change: an epoch that it had cut goes on, without losing or repeating a sample.
    """
    stop = data.draw(st.integers(0, len(case.steps)), label="stop")
    state = LoggedTraining(case).train(updates=stop).optimizer.state_dict()
    sizes_made = case.trace.batch_sizes(range(stop)).tolist()
    future = data.draw(sizes(min(case.dataset_size, 60)), label="future")
    other_trace = vbs.BatchTrace.from_sizes(sizes_made + future, on_end=data.draw(st.sampled_from(["hold", "cycle"])))
    made = sum(update.batch_size for of_epoch in case.updates for update in of_epoch if update.step < stop)
    ends = {name: data.draw(st.none() | st.integers(1, 100), label=name) for name in case.ends}
    other = replace(case, trace=other_trace, begin=after(case, stop), samples_made=made, **ends)
    run = LoggedTraining(other)
    with pytest.warns(UserWarning, match=rf"after update {stop} ") if is_other(case, other) else nullcontext():
        run.optimizer.load_state_dict(state)
    assert together([run.train().log]) == other.steps


@pytest.mark.parametrize("traces", [(8, [8, 8, 8, 9] * 9), (AdaptiveTrace(PerDevice(8)), AdaptiveTrace(PerDevice(9)))])
@pytest.mark.parametrize("by_optimizer", [False, True])
def test_a_warning_of_a_restore_names_the_line_that_restores(traces, by_optimizer):
    def made(trace):
        sampler = vbs.CustomSampler(99, trace, num_replicas=1, rank=0)
        inner = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        return vbs.CustomOptimizer(inner, sampler) if by_optimizer else sampler

    before, after = map(made, traces)
    with pytest.warns(UserWarning, match="Resumed with another AdaptiveTrace|The batch trace differs") as caught:
        after.load_state_dict(before.state_dict())
    (warning,) = caught
    assert (warning.filename, linecache.getline(__file__, warning.lineno).strip()) == (
        __file__,
        "after.load_state_dict(before.state_dict())",
    )


def after(case, stop):
    """Where the next update begins."""
    made = [(update, update is of_epoch[-1]) for of_epoch in case.updates for update in of_epoch][:stop]
    if not made:
        return 0, 0, 0
    last, ended = made[-1]
    ended = ended and case.is_complete(last.epoch)
    return (last.epoch + 1, stop, 0) if ended else (last.epoch, stop, last.start + last.batch_size)


def is_other(case, other):
    return case.trace != other.trace


def test_an_epoch_that_has_ended_stays_ended():
    """Three steps of 40, 40, 50 in epochs of 100 samples that drop the rest; then the third is 20, and would fit."""
    before = replace(CASE, trace=vbs.BatchTrace.of([40, 40, 50, 50]), dataset_size=100, drop_last=True, epochs=2)
    after = replace(before, trace=vbs.BatchTrace.of([40, 40, 20, 80, 50, 50]))
    for updates in (2, 3):
        other = after if updates == 2 else replace(after, trace=vbs.BatchTrace.of([40, 40, 50, 20, 30]))
        state = LoggedTraining(before).train(updates=updates).optimizer.state_dict()
        run = LoggedTraining(replace(other, begin=(1, 2, 0)))
        with pytest.warns(UserWarning, match=f"^The batch trace differs .* after update {updates} "):
            run.optimizer.load_state_dict(state)
        assert [step for _, step, _ in together([run.train().log])] == list(range(updates, 4 if updates == 2 else 5))


@pytest.mark.parametrize("strict", [True, False])
def test_a_trace_that_is_shorter_than_what_was_trained_is_refused(strict):
    state = LoggedTraining(CASE).train(updates=4).sampler.state_dict()
    with pytest.raises(ValueError, match=r"the steps that were trained, but it has 3 and .* step 4"):
        replace(CASE, trace=vbs.BatchTrace.of([7, 3, 12]), dataset_size=20).sampler().load_state_dict(state, strict)


# ------------------------------------------------------------------------------------------------- set_epoch and states


def batches(**options):
    """Of each of the four epochs."""
    result = []
    for epoch in range(4):
        sampler = CASE.sampler(**options)
        sampler.set_epoch(epoch)
        result.append(list(sampler))
    return result


def test_set_epoch_moves_to_any_epoch_whatever_was_read():
    sampler, expected = CASE.sampler(), batches()
    for epoch in (3, 0, 2, 2, 1):
        sampler.set_epoch(epoch)
        assert sampler.epoch == epoch
        assert list(sampler) == expected[epoch]
        assert list(sampler) == expected[epoch]  # again, as any PyTorch sampler: nothing was committed
    sampler.set_epoch(np.int64(3))
    assert type(sampler.epoch) is int
    assert list(sampler) == expected[3]


def test_set_epoch_continues_the_epoch_under_way_and_says_what_it_skips():
    run = LoggedTraining(CASE).train(updates=3)
    run.set_epoch(0)
    assert run.sampler.state_dict()["step"] == run.optimizer.updates == 3
    with pytest.warns(UserWarning, match=r"^set_epoch\(2\) skips 13 updates and 58 samples, as after a break"):
        run.set_epoch(2)
    assert run.optimizer.updates == run.sampler.state_dict()["step"] == CASE.updates[2][0].step == 16
    assert run.optimizer.samples == 7 + 3 + 12
    run.train(updates=1)
    assert run.optimizer.samples == 22 + CASE.updates[2][0].batch_size


@pytest.mark.parametrize("trace", [CASE.trace, AdaptiveTrace(PerDevice(4), every=2, delay=5)])
def test_a_world_that_changes_at_the_start_of_an_epoch_stays(trace):
    """As where ranks come and go: the loop then sets the epoch once more."""
    sampler = vbs.CustomSampler(40, trace, 2, 0, 4)
    for epoch, world in ((1, World(0, 3)), (1, World(1, 5)), (2, World(0, 2))):
        sampler.set_epoch(epoch)
        assert sampler.training.enter_world(world, loaded=False)
        sampler.set_epoch(epoch)
        assert (sampler.world, sampler.epoch) == (world, epoch)
        assert not sampler.training.enter_world(world, loaded=False)


def test_set_epoch_keeps_a_restored_position_in_that_epoch():
    state = LoggedTraining(CASE).train(updates=len(CASE.updates[0]) + 2).sampler.state_dict()
    sampler = CASE.sampler()
    sampler.load_state_dict(state)
    sampler.set_epoch(1)
    assert list(sampler) == batches()[1][3:]  # 1 and 2 microbatches were committed
    sampler.set_epoch(2)
    assert list(sampler) == batches()[2]
    sampler.set_epoch(1)
    assert list(sampler) == batches()[1][3:]


def test_state_dict_holds_the_committed_position_as_plain_numbers():
    run = LoggedTraining(CASE).train(updates=2)
    state = run.sampler.state_dict()
    assert {type(value) for value in state.values()} == {int, bool, str}
    assert json.loads(json.dumps(state)) == state
    assert (state["epoch"], state["step"]) == (0, 2)
    ahead = iter(run.sampler)
    for batch in [next(ahead) for _ in range(4)][:1]:
        run.take(batch)  # the first of several of a step
    assert run.sampler.state_dict() == state
    assert not {"rank", "world", "num_replicas", "minibatch_size"} & set(state)


def test_an_optimizer_created_after_a_restored_sampler_follows_it():
    state = LoggedTraining(CASE).train(updates=2).sampler.state_dict()
    sampler = CASE.sampler()
    sampler.load_state_dict(state)
    assert list(sampler) == batches()[0][5:]  # 3 and 2 microbatches were committed
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)]), sampler)
    assert (optimizer.epoch, optimizer.updates) == (0, 2)


def test_the_optimizers_clock_overrides_a_samplers_state():
    early, late = LoggedTraining(CASE).train(updates=2), LoggedTraining(CASE).train(updates=9)
    run = LoggedTraining(CASE)
    run.optimizer.load_state_dict(late.optimizer.state_dict())
    run.sampler.load_state_dict(early.sampler.state_dict())
    assert run.sampler.state_dict() == late.sampler.state_dict()
    assert together([run.train().log]) == CASE.steps[9:]


DIFFERENT = {
    "dataset_size": replace(CASE, dataset_size=41),
    "seed": replace(CASE, seed=4),
    "drop_last": replace(CASE, drop_last=True),
    "trace": replace(CASE, trace=vbs.BatchTrace.from_sizes([7, 4, 12, 1, 5], on_end="cycle")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_rejects_a_state_of_other_samples_if_strict(name):
    state, sampler = LoggedTraining(DIFFERENT[name]).train(updates=2).sampler.state_dict(), CASE.sampler()
    found = (
        "the first 2 batch sizes of the trace are not the same" if name == "trace" else rf"{name} was \S+ and is \S+"
    )
    with pytest.raises(ValueError, match=rf"^a state .* but {found}; restore .* strict=False"):
        sampler.load_state_dict(state)
    assert sampler.state_dict()["step"] == 0
    sampler.load_state_dict(state, strict=False)
    assert sampler.state_dict()["step"] == 2


def test_the_error_names_all_differences_of_a_state():
    state = {**CASE.sampler().state_dict(), "seed": 9}
    with pytest.raises(
        ValueError, match="but dataset_size was 40 and is 39, seed was 9 and is 3, shuffle was True and is"
    ):
        replace(CASE, dataset_size=39).sampler(shuffle=False).load_state_dict(state)


def test_rejects_a_position_outside_the_plan():
    state = {**CASE.sampler().state_dict(), "epoch": 1, "first_step": 8, "step": 40}
    with pytest.raises(
        ValueError, match=r"state is at step 40, but here epoch 1 begins at step 8 and ends before step 16; restore"
    ):
        CASE.sampler().load_state_dict(state, strict=False)
