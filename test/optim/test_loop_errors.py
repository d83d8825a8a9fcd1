"""Loops that raise: what is wrong is said, with what to do."""

import copy
import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.loops import CASE, EACH, NOT_STEPPED, InThread, begun, epoch_steps, take, with_prefetching
from helpers.properties import examples
from helpers.runs import Run, error_of, read_ahead, together

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


SAME_UPDATE = r"the sampler's iteration began at {} and the optimizer is at {}; call set_epoch with the same epoch"
NOT_ITS_OWN = r"that sampler has yielded {} and this is number {}; pass the same CustomSampler to"
ANEW = r"but this iteration was begun before the optimizer moved to epoch 0, step {}; start a new loop over the loader"


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
    with pytest.raises(RuntimeError, match="all updates of epoch 0 are committed; read the loader"):
        run.take(next(batches))
    run.weight.sum().backward()
    with pytest.raises(RuntimeError, match=NOT_ITS_OWN.format(17, 18)):
        run.optimizer.step()


def test_the_error_is_raised_at_the_first_read_and_not_by_iter():
    """A loader that iterates in a thread would hang: torch_xla's calls `iter` where nothing closes its queues."""
    run = Run(replace(CASE, trace=vbs.BatchTrace.from_sizes([10] * 4), epochs=1))
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
    run = Run(replace(CASE, **ends))
    for epoch in range(7):
        for name in said.split():
            getattr(run, name).set_epoch(epoch)
        take(run, iter(run.sampler), 100)
    assert run.optimizer.done
    assert together([run.log]) == run.case.steps
    with pytest.raises(
        RuntimeError, match=r"but the training has ended after \d+ updates; read the data by another loa"
    ):
        next(iter(run.sampler))  # that nobody has announced, as by update_bn(loader, model)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_states_of_optimizers_at_different_updates_are_told(order):
    """Saved when one of the two had begun the next epoch."""

    def create():
        sampler, weights = CASE.sampler(), [torch.zeros(1, requires_grad=True) for _ in range(2)]
        return sampler, weights, [vbs.ConstantOptimizer(torch.optim.SGD([one]), sampler) for one in weights]

    sampler, weights, optimizers = create()
    for number, _ in enumerate(itertools.chain(sampler, sampler)):
        for weight, optimizer in zip(weights, optimizers[: 2 if number < 17 else 1], strict=False):
            weight.sum().backward()
            optimizer.step()
        if number == 17:
            break
    states = [optimizer.state_dict() for optimizer in optimizers]
    sampler, weights, optimizers = create()
    for number in order:
        optimizers[number].load_state_dict(states[number])
    next(iter(sampler))
    with pytest.raises(RuntimeError, match="must be at the same update, but the sampler's iteration began at epoch 1"):  # noqa: PT012
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.sum().backward()
            optimizer.step()


@pytest.mark.filterwarnings("ignore:set_epoch")
def test_set_epoch_of_neither_moves_back():
    run = begun(2)
    take(run, iter(run.sampler), 5)
    for one in (run.sampler, run.optimizer):
        with pytest.raises(RuntimeError, match="epoch 0 is over and the next update is in epoch 2; loop over range"):
            one.set_epoch(0)
    run.set_epoch(2)
    take(run, iter(run.sampler), 100)
    assert together([run.log]) == epoch_steps(2)


@with_prefetching
def test_raises_if_an_update_comes_from_two_iterations(ahead):
    run = begun()
    take(run, read_ahead(run.sampler, ahead), 4)  # of the second update's two
    message = r"step 1 had 1 of 2 when the loader was iterated again; call optimizer.discard_step\(\) first"
    with pytest.raises(RuntimeError, match=message):
        take(run, read_ahead(run.sampler, ahead), 1)
    run.discard_step()
    take(run, read_ahead(run.sampler, ahead), 14)
    assert together([run.log]) == epoch_steps(0)


@with_prefetching
def test_set_epoch_detects_a_loop_without_step(ahead):
    run = begun()
    list(read_ahead(run.sampler, ahead))
    with pytest.raises(RuntimeError, match=NOT_STEPPED.format(0)):
        run.sampler.set_epoch(1)


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


def test_raises_if_the_loader_batches_microbatches():
    """`DataLoader(data, sampler=sampler, batch_size=4)` yields four of them at a time."""
    run = begun()
    loader = DataLoader(TensorDataset(torch.arange(40)), sampler=run.sampler, batch_size=4)
    with pytest.raises(RuntimeError, match=EACH.format(3) + r".* pass the sampler to the loader as batch_sampler, "):  # noqa: PT012
        for _ in loader:
            run.weight.sum().backward()
            run.optimizer.step()


def test_raises_if_an_iteration_continues_after_its_update_started_over():
    def load(run):
        run.discard_step()
        run.optimizer.load_state_dict(saved)

    saved = copy.deepcopy(begun().optimizer.state_dict())
    again = [Run.discard_step, lambda run: run.set_epoch(0), load]
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
    run, state = Run(CASE), Run(CASE).train(updates=8).optimizer.state_dict()
    state["vbs"]["sampler"]["end_pending"] = pending
    run.optimizer.load_state_dict(state)
    if pending:
        assert run.optimizer.epoch == 0
        assert list(run.sampler) == []
    assert run.optimizer.epoch == 1
    take(run, iter(run.sampler), 100)
    assert together([run.log]) == epoch_steps(1)


# step() too rarely or too often. --------------------------------------------------------------------------------------


@with_prefetching
@pytest.mark.parametrize("every", [2, 3, 4])
@pytest.mark.parametrize("first", [0, 1])
def test_raises_if_the_loop_accumulates_by_itself(every, first, ahead):
    """`if number % every == 0: optimizer.step()`: raises before the first update, of three microbatches, ends."""
    run, calls, last = begun(), 0, 2
    with pytest.raises(RuntimeError, match=EACH.format(every - 1)):  # noqa: PT012
        for number, _ in enumerate(read_ahead(run.sampler, ahead)):
            run.weight.sum().backward()
            if number % every == (every - 1) * first:
                calls += 1
                run.optimizer.step()
    assert calls == last
    assert run.optimizer.updates == 0


LEAVING = {
    "set_epoch": lambda run: run.sampler.set_epoch(1),
    "a new iteration": lambda run: next(iter(run.sampler)),
    "vbs.updates": lambda run: list(next(iter(vbs.updates(run.sampler, run.optimizer)))),
}
SAVING = {"done": lambda run: run.optimizer.done, "state_dict": lambda run: run.optimizer.state_dict()}


@with_prefetching
@pytest.mark.parametrize("left_out", range(17))
@pytest.mark.parametrize("then", LEAVING)
def test_raises_if_a_microbatch_is_skipped(left_out, ahead, then):
    """`if loss.isnan(): continue`: at the next `step()`; for the first or the last one of an epoch at its end.

    How far a loader reads ahead is not known before the first `step()`: with workers the first one is not seen.
    """
    if ahead and left_out == 0:
        return
    run = begun()

    def loop():
        for number, batch in enumerate(read_ahead(run.sampler, ahead)):
            if number != left_out:
                (run.weight * len(batch)).backward()
                run.optimizer.step()
            assert number <= left_out or left_out == 0

    error = error_of(loop)
    if 0 < left_out < 16:
        assert error is not None
        assert error.startswith("step() must follow the backward() of every microbatch, but 1 of those that were read")
        assert run.optimizer.updates == sum(end <= left_out for end in itertools.accumulate([3, 2, 3, 1, 2, 3, 2, 1]))
        return
    assert error is None
    with pytest.raises(RuntimeError, match="17 microbatches, with 16 calls of"):
        LEAVING[then](run)
    run.discard_step()
    take(run, iter(run.sampler), 1)


@pytest.mark.parametrize("call", SAVING)
@pytest.mark.parametrize("sizes", [[4], [7, 3, 12, 1, 5]])
def test_a_loop_that_has_skipped_the_last_microbatch_cannot_be_saved(call, sizes):
    """Also of the last epoch, after which nothing else tells; a loop that stops with it in hand has not skipped it."""
    run = Run(replace(CASE, trace=vbs.BatchTrace.from_sizes(sizes, on_end="cycle"), epochs=1))
    whole = sum(1 for _ in CASE.sampler()) if len(sizes) > 1 else 10
    for number, batch in enumerate(run.sampler):
        SAVING["done"](run)
        if number < whole - 1:
            run.take(batch)
    with pytest.raises(RuntimeError, match=f"{whole} microbatches, with {whole - 1} calls of"):
        SAVING[call](run)
    run.discard_step()
    take(run, iter(run.sampler), 3)
    assert run.optimizer.done is False
    assert run.optimizer.state_dict()["vbs"]["sampler"]["epoch"] == 0


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_two_steps_a_microbatch_raise_before_the_weights_change(workers):
    """Two losses, each with backward() and step(); whatever the workers of the loader have prefetched."""
    run = Run(replace(CASE, trace=vbs.BatchTrace.from_sizes([8], on_end="hold"), dataset_size=400))
    with pytest.raises(RuntimeError, match=r"was called 1 times more than|this is number 2"):  # noqa: PT012
        for batch in DataLoader(range(400), batch_sampler=run.sampler, num_workers=workers):
            for _ in range(2):
                (run.weight * len(batch)).backward()
                run.optimizer.step()
    assert run.optimizer.updates == 0


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
    skipped = ahead and stop == 16  # a loop that leaves with the last microbatch in hand counts as one that skips it
    error = None if run.optimizer.inside_step else error_of(lambda: again(run, backward))
    if run.optimizer.inside_step or skipped or by == "loss":
        refused = "must reach optimizer.step()" if skipped else "a backward() that no step() has counted"
        assert error is None or refused in error
        run.discard_step()
        again(run, backward)
    else:
        assert error is None
    assert run.weight.item() == pytest.approx(-sum(np.mean(samples) for _, _, samples in CASE.steps[:8]))


def again(run, backward):
    for batch in run.sampler:
        backward(batch)
        run.optimizer.step()


@pytest.mark.filterwarnings("ignore:set_epoch")
@pytest.mark.parametrize("said", [False, True])
def test_a_thread_may_have_read_the_epoch_when_the_loop_leaves_it(said):
    """How far such a loader reads ahead is unknown; `discard_step()` states that the loop leaves on purpose."""
    run = begun()
    batches = iter(InThread(run.sampler, 0))
    take(run, batches, 3)
    while not (run.sampler.iteration and run.sampler.iteration.exhausted):
        time.sleep(0.001)
    if said:
        run.discard_step()
        run.set_epoch(1)
        take(run, iter(run.sampler), 16)
        assert together([run.log]) == CASE.steps[:1] + epoch_steps(1)
    else:
        with pytest.raises(RuntimeError, match=NOT_STEPPED.format(3) + r".*to leave .* early, call .*discard_step"):
            run.set_epoch(1)
