"""Loops that raise: what is wrong is said, with what to do."""

import copy
import itertools
import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.loops import CASE, EACH, begun, epoch_steps, take, with_prefetching
from helpers.properties import examples
from helpers.runs import LoggedTraining, error_of, read_ahead, together

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


SAME_UPDATE = r"the sampler's iteration began at {} and the optimizer is at {}; call set_epoch with the same epoch"
NOT_ITS_OWN = r"this is step\(\) {1}, but the optimizer's sampler has yielded {0} microbatches; pass it as batch_samp"
ANEW = r"optimizer has moved to epoch 0, step {}, but this loop over the loader was begun before; start a new one after"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("said", [(), ("sampler",), ("optimizer",), ("optimizer", "sampler", "sampler")])
def test_set_epoch_of_the_next_epoch_is_optional(workers, said):
    run = begun()
    loader = DataLoader(range(40), batch_sampler=run.sampler, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(3):
        for name in said:
            getattr(run, name).set_epoch(epoch)
        take(run, iter(loader), 100)
    assert together([run.log]) == CASE.steps


def test_raises_if_an_epoch_is_repeated_from_memory():
    run = begun()
    batches = itertools.cycle(run.sampler)
    take(run, batches, 17)
    with pytest.raises(RuntimeError, match="all updates of epoch 0 are made, but a microbatch came"):
        run.take(next(batches))
    run.weight.sum().backward()
    with pytest.raises(RuntimeError, match=NOT_ITS_OWN.format(17, 18)):
        run.optimizer.step()


def test_the_error_is_raised_at_the_first_read_and_not_by_iter():
    """A loader that iterates in a thread would hang: torch_xla's calls `iter` where nothing closes its queues."""
    run = LoggedTraining(replace(CASE, trace=vbs.BatchTrace.from_sizes([10] * 4), epochs=1))
    take(run, iter(run.sampler), 100)
    batches = iter(run.sampler)
    for _ in range(2):
        with pytest.raises(ValueError, match="its 4 steps end in epoch 1"):
            next(batches)


@pytest.mark.parametrize("name", ["sampler", "optimizer"])
def test_set_epoch_of_one_moves_both_and_says_what_is_skipped(name):
    run = begun()
    skips = r"^set_epoch\(1\) skips 8 updates and 40 samples, .*; call it with optimizer.epo"
    with pytest.warns(UserWarning, match=skips):  # noqa: PT031
        getattr(run, name).set_epoch(1)
        take(run, iter(run.sampler), 100)
    assert together([run.log]) == epoch_steps(1)
    assert run.optimizer.samples == 40


@pytest.mark.parametrize("said", ["sampler", "optimizer", "sampler optimizer", "optimizer sampler optimizer"])
@pytest.mark.parametrize("ends", [{"max_updates": 11}, {"max_samples": 45}])
def test_epochs_after_the_end_of_the_training_are_empty(said, ends):
    run = LoggedTraining(replace(CASE, **ends))
    for epoch in range(7):
        for name in said.split():
            getattr(run, name).set_epoch(epoch)
        take(run, iter(run.sampler), 100)
    assert run.optimizer.done
    assert together([run.log]) == run.case.steps
    with pytest.raises(RuntimeError, match=r"^the training has ended after \d+ updates, but .*; use another loader"):
        next(iter(run.sampler))  # that nobody has announced, as by update_bn(loader, model)


def two_optimizers(sampler):
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    return [vbs.ConstantOptimizer(torch.optim.SGD([one], lr=0.1), sampler) for one in weights]


def step(optimizer):
    optimizer.param_groups[0]["params"][0].sum().backward()
    return optimizer.step()


def test_an_update_is_committed_when_the_last_of_several_optimizers_has_made_it():
    sampler = CASE.sampler()
    one, other = two_optimizers(sampler)
    for _ in itertools.islice(sampler, 3):
        assert (one.updates, one.samples, other.inside_step) == (0, 0, one.inside_step)
        made = step(one), step(other)
        assert made[0] == made[1]
    assert (one.updates, other.updates, sampler.samples) == (1, 1, 7)
    batches = iter(sampler)
    for _ in range(2):
        next(batches)
        updated = step(one)
    assert updated  # its own, in one turn
    assert (one.updates, sampler.samples) == (1, 7)
    for call in (one.state_dict, other.state_dict, one.discard_step):
        with pytest.raises(RuntimeError, match=r"some of the sampler's optimizers only; call step.. of each optimizer"):
            call()
    assert [step(other), step(other)] == [False, True]
    assert (one.updates, other.updates, sampler.samples) == (2, 2, 10)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert one.updates == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_an_optimizer_that_is_never_used_changes_nothing_and_one_that_comes_later_raises(workers):
    """As that of a notebook's cell that was run twice; to join, one has to be created."""
    sampler = vbs.CustomSampler(40, 4, 1, 0, 4)
    one, other = two_optimizers(sampler)
    for number, _ in enumerate(DataLoader(range(40), batch_sampler=sampler, num_workers=workers), start=1):
        assert step(one)
        assert (one.updates, one.samples, one.inside_step) == (number, 4 * number, False)
        one.state_dict()
    assert one.epoch == 1
    with pytest.raises(RuntimeError, match=r"this one has missed updates before update 10; .*; create it anew"):
        step(other)
    third = vbs.ConstantOptimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), sampler)
    for _ in sampler:
        assert step(one)
        assert step(third)
    assert (one.updates, third.updates, sampler.epoch) == (20, 20, 2)


@pytest.mark.parametrize("way", ["plain", "updates"])
def test_an_optimizer_that_misses_an_update_raises_before_the_next_one(way):
    """As one that steps at every second update; unless it was deleted."""
    sampler = vbs.CustomSampler(40, 4, 1, 0, 4)
    one, other = two_optimizers(sampler)
    batches = sampler if way == "plain" else (row for update in vbs.updates(sampler, one) for row in update)
    with pytest.raises(RuntimeError, match=r"one has not made the last update; .* a sampler of its own; delete one"):  # noqa: PT012
        for number, _ in enumerate(batches):
            step(one)
            if number != 1:
                step(other)
    assert (one.updates, number) == (1, 2 if way == "plain" else 1)
    del other
    one.state_dict()
    assert one.updates == 2


@pytest.mark.parametrize("discards", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_loop_that_is_left_between_two_steps_does_not_go_on(stop, before, discards):
    """One has made update `stop`, and the other has not, `before` or after its backward(); also in the first one."""
    sampler = vbs.CustomSampler(40, 4, 1, 0, 4)
    one, other = two_optimizers(sampler)

    def backward(optimizer):
        optimizer.backward(optimizer.param_groups[0]["params"][0].sum())

    def train(*, leaves):
        for number, update in enumerate(vbs.updates(sampler, one)):
            for _ in update:
                backward(one)
                one.step()
                if leaves and number == stop and before:
                    return
                backward(other)
                if leaves and number == stop:
                    return
                other.step()

    train(leaves=True)
    if discards:
        error_of(one.discard_step)
    with pytest.raises(RuntimeError, match=r"step.. of all optimizers|restore a state|by some of the sampler's"):
        train(leaves=False)
    assert one.updates <= stop + 2


def test_an_exception_between_two_inner_steps_needs_a_restore():
    sampler = vbs.CustomSampler(40, 4, 1, 0, 4)
    one, other = two_optimizers(sampler)
    next(iter(sampler))
    step(one)
    with pytest.raises(RuntimeError, match="must follow the backward"):
        other.step()
    for optimizer in (one, other):
        with pytest.raises(RuntimeError, match="restore the states of model and optimizer, as of the last checkpoint"):
            optimizer.discard_step()


@pytest.mark.filterwarnings("ignore:set_epoch")
def test_set_epoch_of_neither_moves_back():
    run = begun(2)
    take(run, iter(run.sampler), 5)
    for one in (run.sampler, run.optimizer):
        with pytest.raises(RuntimeError, match=r"epoch 0 was chosen, but it is over and .* in epoch 2; loop over vbs"):
            one.set_epoch(0)
    run.set_epoch(2)
    take(run, iter(run.sampler), 100)
    assert together([run.log]) == epoch_steps(2)


@with_prefetching
def test_raises_if_an_update_comes_from_two_iterations(ahead):
    run = begun()
    take(run, read_ahead(run.sampler, ahead), 4)  # of the second update's two
    message = r"step 1 had 1 of 2 microbatches, but the loader was iterated again; call optimizer.discard_step\(\)"
    with pytest.raises(RuntimeError, match=message):
        take(run, read_ahead(run.sampler, ahead), 1)
    run.discard_step()
    take(run, read_ahead(run.sampler, ahead), 14)
    assert together([run.log]) == epoch_steps(0)


@with_prefetching
def test_reading_the_sampler_for_something_else_harms_nothing(ahead):
    run = begun()
    list(read_ahead(run.sampler, ahead))
    take(run, read_ahead(run.sampler, ahead), 100)
    assert together([run.log]) == epoch_steps(0)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda sampler: CASE.sampler()], ids=["a copy", "an equal one"])
def test_raises_if_the_loader_has_another_sampler(make):
    run = begun()
    loader = DataLoader(range(40), batch_sampler=make(run.sampler))
    with pytest.raises(RuntimeError, match=NOT_ITS_OWN.format(0, 1)):
        take(run, iter(loader), 1)
    run.discard_step()
    next(iter(run.sampler))  # also when its own was looked at
    take(run, iter(loader), 1)
    with pytest.raises(RuntimeError, match=NOT_ITS_OWN.format(1, 2)):
        take(run, iter(loader), 1)


def test_raises_if_an_iteration_continues_after_its_update_started_over():
    def load(run):
        run.discard_step()
        run.optimizer.load_state_dict(saved)

    saved = copy.deepcopy(begun().optimizer.state_dict())
    again = [LoggedTraining.discard_step, lambda run: run.set_epoch(0), load]
    for number, go_back in itertools.product((1, 2, 3, 4), again):
        run = begun()
        batches = iter(run.sampler)
        take(run, batches, number)
        go_back(run)
        here = run.optimizer.updates
        if number == 3 and go_back is again[1]:  # between two updates nothing starts over
            take(run, batches, 2)
            continue
        with pytest.raises(RuntimeError, match=ANEW.format(here)):
            take(run, batches, 1)
        whole = len(run.log)
        run.discard_step()
        take(run, iter(run.sampler), 100)
        assert together([run.log[whole:]]) == CASE.steps[here:8]


def test_raises_if_two_iterations_alternate():
    run = begun()
    one = iter(run.sampler)
    take(run, one, 3)
    other = iter(run.sampler)
    take(run, other, 2)
    with pytest.raises(RuntimeError, match=SAME_UPDATE.format("epoch 0, step 0", "epoch 0, step 2")):
        take(run, one, 1)
    with pytest.raises(
        RuntimeError, match=r"step 2 was interrupted by an exception; call optimizer.discard_step\(\) and"
    ):
        take(run, other, 1)
    run.discard_step()
    take(run, iter(run.sampler), 100)
    assert together([run.log]) == epoch_steps(0)


@pytest.mark.parametrize("pending", [False, True])
def test_a_run_that_is_restored_at_the_end_of_an_epoch_goes_on(pending):
    """If what the loop does there is to come, after an empty rest."""
    run, state = LoggedTraining(CASE), LoggedTraining(CASE).train(updates=8).optimizer.state_dict()
    state["vbs"]["sampler"]["end_pending"] = pending
    run.optimizer.load_state_dict(state)
    if pending:
        assert run.optimizer.epoch == 0
        assert list(run.sampler) == []
    assert run.optimizer.epoch == 1
    take(run, iter(run.sampler), 100)
    assert together([run.log]) == epoch_steps(1)


# step() too rarely or too often. --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["optimizer", "loss"])
@pytest.mark.parametrize("every", [2, 3, 4])
@pytest.mark.parametrize("first", [0, 1])
def test_raises_if_the_loop_accumulates_by_itself(every, first, by):
    """`if number % every == 0: optimizer.step()`: raises before the first update, of three microbatches, ends.

    With `loss.backward()` several reads before the first `step()` look like those of a loader that prefetches.
    """
    run, calls = begun(), 0
    error = (
        pytest.raises(RuntimeError, match=EACH.format(every - 1)) if by == "optimizer" or not first else nullcontext()
    )
    with error:
        for number, _ in enumerate(run.sampler):
            loss = run.weight.sum()
            run.optimizer.backward(loss) if by == "optimizer" else loss.backward()
            if number % every == (every - 1) * first:
                calls += 1
                run.optimizer.step()
    assert calls > 2 or run.optimizer.updates == 0


@pytest.mark.parametrize("left_out", range(1, 17))
def test_raises_if_a_microbatch_is_skipped(left_out):
    """`if loss.isnan(): continue`: at the next `step()`, of a loader that prefetches nothing."""
    run = begun()

    def loop():
        for number, batch in enumerate(run.sampler):
            if number != left_out:
                (run.weight * len(batch)).backward()
                run.optimizer.step()
            assert number <= left_out

    error = error_of(loop)
    assert run.optimizer.updates == sum(end <= left_out for end in itertools.accumulate([3, 2, 3, 1, 2, 3, 2, 1]))
    if left_out == 16:  # of an update of one microbatch, the last one of the epoch
        assert error is None
        with pytest.warns(UserWarning, match=r"^set_epoch\(1\) skips 1 updates and 2 samples"):
            run.set_epoch(1)
        return
    assert error.startswith("step() must follow the backward() of every microbatch, but 1 of those that were read")
    run.discard_step()
    take(run, iter(run.sampler), 1)


def test_the_last_microbatch_of_an_epoch_that_is_skipped_comes_again():
    """Without `set_epoch` a loop goes on where the training is."""
    run = begun()
    for number, batch in enumerate(run.sampler):
        if number < 16:
            run.take(batch)
    take(run, iter(run.sampler), 100)
    assert together([run.log]) == epoch_steps(0)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_two_steps_a_microbatch_raise(workers):
    """Two losses, each with backward() and step(): before the weights change, or when all that was read is counted."""
    run = LoggedTraining(replace(CASE, trace=vbs.BatchTrace.from_sizes([8], on_end="hold"), dataset_size=400))
    message = r"was called 1 times more than|this is step\(\) \d+, but .* yielded (?P<read>\d+) microbatches"
    with pytest.raises(RuntimeError, match=message) as error:  # noqa: PT012
        for batch in DataLoader(range(400), batch_sampler=run.sampler, num_workers=workers):
            for _ in range(2):
                (run.weight * len(batch)).backward()
                run.optimizer.step()
    read = re.search(message, str(error.value))["read"] if workers else 1
    assert run.optimizer.updates == int(read) // 2


@given(st.integers(0, 16), st.sampled_from([0, 1, 3]), st.sampled_from(["loss", "optimizer"]))
@examples(40)
def test_a_backward_that_a_loop_has_left_is_in_no_update(stop, ahead, by):
    """Ctrl-C in a notebook between `backward()` and `step()`, and the cell is run again."""
    run = begun()
    run.optimizer.param_groups[0]["lr"] = 1.0

    def backward(batch):
        loss = run.weight * sum(batch) / len(batch)
        loss.backward() if by == "loss" else run.optimizer.backward(loss)

    batches = read_ahead(run.sampler, ahead)
    for batch in itertools.islice(batches, stop):
        backward(batch)
        run.optimizer.step()
    backward(next(batches))
    del batches
    if run.optimizer.inside_step:
        run.discard_step()
    again(run, backward)
    assert run.weight.item() == pytest.approx(-sum(np.mean(samples) for _, _, samples in CASE.steps[:8]))


def again(run, backward):
    for batch in run.sampler:
        backward(batch)
        run.optimizer.step()
