"""Where a training ends: `max_updates`, `max_samples`, a trace that stops, `optimizer.done` and `remaining_epochs`."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import assert_equal, training
from helpers.runs import LoggedTraining, Sampling, read_ahead, samplings, together
from helpers.schedules import counter
from variable_batch_size.testing import run_ranks

ENDLESS = {"trace": vbs.BatchTrace.of([7, 3, 12, 1, 5], on_end="cycle"), "dataset_size": 40, "minibatch_size": 4}


def ending(**end):
    arguments = {**ENDLESS, "drop_last": False, "fixed_shape": False, "seed": 3, "epochs": 4, **end}
    return Sampling(**arguments)


@given(samplings(largest_dataset=60), st.integers(1, 4), st.integers(0, 9))
@examples(60)
def test_an_ordinary_loop_ends_with_the_training(case, size, ahead):
    """On every rank, after exactly the updates and samples; the epochs that follow are empty."""

    def train(backend):
        run = LoggedTraining(case, backend)
        for epoch in range(case.epochs):
            assert run.optimizer.done == (epoch > 0 and case.ended_after(epoch - 1))
            run.set_epoch(epoch)
            for batch in read_ahead(run.sampler, ahead):
                run.take(batch)
        return run, run.optimizer.done, run.optimizer.samples

    runs, done, samples = zip(*run_ranks(train, size), strict=True)
    assert together(run.log for run in runs) == case.steps
    assert set(done) == {case.ended_after(case.epochs - 1)}
    assert set(samples) == {sum(len(used) for *_, used in case.steps)}


@given(
    samplings(largest_dataset=60),
    st.sampled_from(["epochs", "progress", "samples", "updates"]),
    st.integers(0, 200),
    st.data(),
)
@examples(100)
def test_remaining_epochs_ends_with_the_epoch_that_reaches_another_measure(case, by, until, data):
    """Also if it is stopped after any update and resumes."""
    case = replace(case, epochs=3)
    made = [update for epoch in case.updates for update in epoch]
    number_of = {"epochs": lambda _: 1, "samples": lambda updates: sum(update.batch_size for update in updates)}.get(
        by, len
    )
    reached = sum(map(number_of, case.updates))
    assume(until <= reached)  # otherwise the training of the twin is too short
    stop, epochs = data.draw(st.integers(1, 1 + len(made)), label="stop"), set()

    def train(run):
        for epoch in vbs.remaining_epochs(run.sampler, run.optimizer, until, by):
            epochs.add(epoch)
            for batch in run.sampler:
                if run.take(batch) and len(run.log) and run.optimizer.updates == stop and run is begun:
                    return run
        return run

    begun = LoggedTraining(case)
    train(begun)
    resumed = LoggedTraining(case)
    resumed.optimizer.load_state_dict(begun.optimizer.state_dict())
    train(resumed)
    expected, number = [], 0
    for epoch, updates in enumerate(case.updates):
        if number < until and not (epoch and case.ended_after(epoch - 1)):
            expected.append(epoch)
            number += number_of(updates)
    assert sorted(epochs) == expected
    assert together([begun.log + resumed.log]) == [step for step in case.steps if step[0] in expected]


def test_an_epoch_that_was_left_early_is_not_repeated():
    run = LoggedTraining(ending())

    def loop():
        for epoch in vbs.remaining_epochs(run.sampler, run.optimizer, 3):
            run.take(next(iter(run.sampler)))
            run.discard_step()
            yield epoch

    with pytest.warns(UserWarning, match="skips"):
        assert list(loop()) == [0, 1, 2]


# ------------------------------------------------------------------------------------------------------ stop and resume


def resumed(folder, run, *, restore=True):
    checkpoint = vbs.Checkpoint(folder, model=run.model, optimizer=run.optimizer, every=1)
    assert checkpoint.restore() == restore
    return checkpoint


@pytest.mark.parametrize("ends", [{"max_updates": 5}, {"max_samples": 140}, {"max_samples": 150}])
def test_the_end_of_the_training_resumes_before_the_loops_code_for_it(tmp_path, ends):
    """Killed after the last `Checkpoint.step()`: the loop still evaluates, and then ends."""
    run = training(sizes=[30], sampling=ends)
    with resumed(tmp_path, run, restore=False) as checkpoint:
        for _ in vbs.remaining_epochs(run.sampler, run.optimizer):
            for _ in run.steps():
                checkpoint.step()
    again, evaluated = training(sizes=[30], sampling=ends), []
    with resumed(tmp_path, again):
        assert not again.optimizer.done
        for epoch in vbs.remaining_epochs(again.sampler, again.optimizer):
            assert list(again.steps()) == []
            evaluated.append(epoch)
    assert evaluated == [2]
    assert again.optimizer.done
    assert_equal(again.weights(), run.weights())


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_a_trace_that_is_too_short_raises_unless_the_training_ends_before():
    short = vbs.BatchTrace.of([30, 30])
    with pytest.raises(ValueError, match=r'epoch 1, .* 40 samples before .* on_end="stop"'):
        ending(trace=short).sampler(epochs=2)
    for ends in ({"max_updates": 2}, {"max_samples": 40}):
        ending(trace=short, **ends).sampler(epochs=9)
    with pytest.raises(ValueError, match=r"1 updates before max_updates=3;"):
        ending(trace=short, max_updates=3).sampler(epochs=2)


@given(stop=st.integers(0, 12), total=st.floats(0.5, 6))
@examples(20)
def test_remaining_epochs_ends_with_the_schedule(stop, total):
    """Also after a restore, and when the schedule has ended already."""

    def start():
        run = training(vbs.AdaScaleOptimizer)
        return run, vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, total=total)

    def train(run, scheduler, updates=math.inf):
        for epoch in vbs.remaining_epochs(run.sampler, run.optimizer, scheduler):
            assert epoch == run.sampler.epoch == run.optimizer.epoch
            for updated in run.steps():
                if updated:
                    scheduler.step()
                if scheduler.done or run.optimizer.updates == updates:
                    break
            if run.optimizer.updates == updates:
                return

    whole, ends = start()
    train(whole, ends)
    begun, scheduler = start()
    if stop:
        train(begun, scheduler, stop)
    resumed, again = start()
    resumed.optimizer.load_state_dict(begun.optimizer.state_dict())
    again.load_state_dict(scheduler.state_dict())
    resumed.model.load_state_dict(begun.model.state_dict())
    train(resumed, again)
    assert again.done
    assert resumed.optimizer.updates == whole.optimizer.updates
    assert list(vbs.remaining_epochs(whole.sampler, whole.optimizer, ends)) == []
    assert ends.passed >= total > ends.passed - 5
