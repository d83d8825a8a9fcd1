"""`vbs.updates`: a loader read update by update."""

import itertools
import re
from collections import deque
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import variable_batch_size as vbs
from helpers.loops import CASE
from helpers.properties import examples
from helpers.runs import LoggedTraining, error_of, read_ahead, samplings, together
from variable_batch_size.testing import run_ranks


class Reading:
    """A loader that reads some microbatches ahead."""

    def __init__(self, run, ahead):
        self.run, self.ahead = run, ahead

    def __iter__(self):
        return read_ahead(self.run.sampler, self.ahead)


def in_groups(updates, number):
    """A framework that reads `number` + 1 updates at once."""
    while group := list(islice(updates, number + 1)):
        yield from group


def one_ahead(updates, number):
    """A framework that reads `number` updates ahead."""
    waiting = deque[Any]()
    for update in updates:
        waiting.append(update)
        if len(waiting) > number:
            yield waiting.popleft()
    yield from waiting


readers = st.sampled_from([one_ahead, in_groups])


@given(
    samplings(largest_dataset=60),
    st.integers(1, 4),
    st.integers(0, 20),
    readers,
    st.integers(0, 3),
    st.integers(0, 1),
    st.booleans(),
)
@examples(80)
def test_a_loop_over_updates_trains_like_one_over_microbatches(
    case, size, loader_ahead, reader, framework_ahead, more, once
):
    def train(backend):
        run = LoggedTraining(case, backend)
        loader = Reading(run, loader_ahead)
        of_all = vbs.updates(loader, run.optimizer, framework_ahead + more)
        for epoch in range(case.epochs):
            updates = of_all if once else vbs.updates(loader, run.optimizer, framework_ahead + more)
            assert len(updates) == len(case.updates[epoch])
            made = 0
            for update in reader(iter(updates), framework_ahead):
                assert len(updates) == len(case.updates[epoch])
                results = [run.take(microbatch) for microbatch in update]
                assert results == [False] * (len(update) - 1) + [True]
                made += 1
            assert made == len(case.updates[epoch])
        return run

    assert together(run.log for run in run_ranks(train, size)) == case.steps


@given(samplings(largest_dataset=60), st.integers(0, 20), st.data())
@examples(60)
def test_it_continues_after_a_restore_and_its_length_is_that_of_the_whole_epoch(case, ahead, data):
    stop = data.draw(st.integers(0, len(case.steps)), label="stop")
    begun, run = LoggedTraining(case).train(updates=stop), LoggedTraining(case)
    run.optimizer.load_state_dict(begun.optimizer.state_dict())
    updates = vbs.updates(Reading(run, ahead), run.optimizer)
    while run.optimizer.epoch < case.epochs:
        epoch = run.optimizer.epoch
        assert len(updates) == len(case.updates[epoch])
        read = [run.take(microbatch) for update in updates for microbatch in update]
        assert case.updates[epoch] == [] or sum(read) in range(1, len(case.updates[epoch]) + 1)
        if not case.updates[epoch]:
            break  # the training has ended
    assert together([begun.log]) + together([run.log]) == case.steps


@given(samplings(largest_dataset=40), st.integers(1, 3))
@examples(30)
def test_two_optimizers_take_turns_at_each_update(case, size):
    """As in a GAN whose generator meets the updated discriminator: each update of both uses the same samples."""

    def train(backend):
        sampler = case.sampler(backend.world)
        weights = [torch.nn.Parameter(torch.zeros(())) for _ in range(2)]
        optimizers = [
            vbs.ConstantOptimizer(torch.optim.SGD([weight], lr=0.0), sampler, backend=backend) for weight in weights
        ]
        used = ([], [])
        for _ in vbs.remaining_epochs(sampler, optimizers, case.epochs):
            for update in vbs.updates(sampler, optimizers[0]):
                microbatches = list(update)
                for log, weight, optimizer in zip(used, weights, optimizers, strict=True):
                    for microbatch in microbatches:
                        (weight * len(microbatch)).backward()
                        updated = optimizer.step()
                        log.append(microbatch)
                    assert updated
                assert optimizers[0].samples == optimizers[1].samples
        assert optimizers[0].updates == optimizers[1].updates == len(case.steps)
        return used

    for first, second in run_ranks(train, size):
        assert first == second


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("missed", range(16))
@pytest.mark.parametrize("whole", [False, True])
def test_a_second_optimizer_that_misses_a_microbatch_raises_before_a_wrong_update(missed, whole):
    """As a generator that steps at every second microbatch only."""
    run = LoggedTraining(CASE)
    other = vbs.ConstantOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), run.sampler)
    number = 0
    with pytest.raises(RuntimeError, match="of all optimizers of a sampler must be called"):  # noqa: PT012
        for update in vbs.updates(run.sampler, run.optimizer):
            for microbatch in list(update) if whole else update:
                run.take(microbatch)
                if number != missed:
                    other.param_groups[0]["params"][0].sum().backward()
                    other.step()
                number += 1
    assert other.updates == sum(end <= missed for end in itertools.accumulate([3, 2, 3, 1, 2, 3, 2, 1]))


@given(samplings(largest_dataset=60), st.integers(0, 20), st.sampled_from(["skip", "twice", "leave"]), st.data())
@examples(100)
def test_a_wrong_loop_raises_before_the_weights_change(case, ahead, wrong, data):
    """A microbatch that does not reach `step()`, also the first or the last of all; one that does twice; a rest."""
    run, last = LoggedTraining(case), False
    number = data.draw(st.integers(0, len(case.steps) - 1), label="update")
    round_index = data.draw(st.integers(0, 30), label="round")

    def loop():
        nonlocal last
        for _ in range(case.epochs):
            for update in vbs.updates(Reading(run, ahead), run.optimizer):
                here = run.optimizer.updates == number
                for index, microbatch in enumerate(update):
                    wrong_here = here and index == round_index % len(update)
                    last |= wrong_here and index == len(update) - 1
                    if wrong_here and wrong == "leave":
                        break
                    for _ in range({"skip": 0, "twice": 2}[wrong] if wrong_here else 1):
                        (run.weight * len(microbatch)).backward()
                        run.optimizer.step()

    error = error_of(loop)
    assert error is not None
    if wrong == "twice":
        assert re.search(r"has yielded (none|\d+) (yet|microbatches); ", error)
        assert run.optimizer.updates == number + last  # a second step() of its last microbatch comes after the update
    else:
        assert f"update {number} is not complete, but the loop asks for the next one" in error
        assert run.optimizer.updates == number


class Changed(Reading):
    """A loader that leaves out one microbatch of an epoch, yields one twice, or ends before it."""

    def __init__(self, run, ahead, wrong, epoch, number):
        super().__init__(run, ahead)
        self.wrong, self.epoch, self.number = wrong, epoch, number

    def __iter__(self):
        here = self.run.optimizer.epoch == self.epoch
        for number, microbatch in enumerate(super().__iter__()):
            if here and number == self.number and self.wrong == "end":
                return
            yield from [microbatch] * (
                {"leave out": 0, "twice": 2}[self.wrong] if here and number == self.number else 1
            )


@given(samplings(largest_dataset=60), st.integers(0, 20), st.sampled_from(["leave out", "twice", "end"]), st.data())
@examples(150)
def test_a_loader_that_changes_the_microbatches_raises(case, ahead, wrong, data):
    """Before a second wrong update, or at the end of the epoch if the loader prefetches.

    But where the first one of an epoch is left out, which looks like a loader that reads one more ahead.
    """
    run = LoggedTraining(case)
    epoch = data.draw(st.sampled_from([epoch for epoch, updates in enumerate(case.updates) if updates]))
    rounds = [-(-len(step[2]) // case.minibatch_size) for step in case.steps if step[0] == epoch]
    first = int(wrong == "leave out")
    assume(sum(rounds) > first)
    number = data.draw(st.integers(first, sum(rounds) - 1))
    update = sum(map(len, case.updates[:epoch])) + sum(end <= number for end in itertools.accumulate(rounds))

    def loop():
        for _ in range(case.epochs):
            for update in vbs.updates(Changed(run, ahead, wrong, epoch, number), run.optimizer):
                for microbatch in update:
                    (run.weight * len(microbatch)).backward()
                    run.optimizer.step()

    error = error_of(loop)
    assert error is not None
    assert re.match(r"the loader must yield (the sampler's microbatches|.* of the optimizer's sampler)", error)
    at_the_end = ahead > 0 or (wrong == "twice" and number == sum(rounds) - 1)
    assert run.optimizer.updates <= (sum(map(len, case.updates[: epoch + 1])) if at_the_end else update + 1)


@pytest.mark.parametrize("sizes", [[40], [20], [15]])  # of one, two and three updates in an epoch
def test_a_loop_that_was_left_in_an_update_raises_when_the_next_one_begins(sizes):
    run = LoggedTraining(replace(CASE, trace=vbs.BatchTrace.from_sizes(sizes, on_end="hold")))
    for update in vbs.updates(Reading(run, 0), run.optimizer):
        run.take(next(iter(update)))
        break
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"step 0 had 1 of|has accumulated only some of its"):  # noqa: PT012
            run.optimizer.state_dict()
            next(iter(vbs.updates(Reading(run, 0), run.optimizer)))
    run.discard_step()
    for update in vbs.updates(Reading(run, 0), run.optimizer):
        for microbatch in update:
            run.take(microbatch)
    assert [entry[1] for entry in together([run.log[1:]])] == list(range(run.optimizer.updates))


def test_a_loop_that_goes_on_after_discard_step_is_told_to_end():
    """`except RuntimeError: optimizer.discard_step(); continue`."""
    run = LoggedTraining(CASE)
    with pytest.raises(RuntimeError, match=r"^the loop must end after .*; break, and begin a new loop"):  # noqa: PT012
        for update in vbs.updates(run.sampler, run.optimizer):
            run.take(next(iter(update)))
            run.discard_step()
    for update in vbs.updates(run.sampler, run.optimizer):
        for microbatch in update:
            run.take(microbatch)
    assert together([run.log]) == CASE.steps[:8]


def test_an_update_must_be_read_within_its_turn():
    run = LoggedTraining(CASE)
    updates = iter(vbs.updates(run.sampler, run.optimizer))
    first = next(updates)
    microbatches = list(first)
    for microbatch in microbatches:
        run.take(microbatch)
    second = next(updates)
    for update in vbs.updates(run.sampler, run.optimizer):
        for microbatch in update:
            run.take(microbatch)
    with pytest.raises(RuntimeError, match="but update 1 is read when 8 updates are made; read it within its turn"):
        list(second)


def test_a_loader_of_something_else_raises():
    run = LoggedTraining(CASE)
    with pytest.raises(RuntimeError, match=r"of the optimizer's sampler, but it yields more than epoch 0 has"):
        list(vbs.updates([[1]] * 99, run.optimizer, ahead=99))
    with pytest.raises(RuntimeError, match=r"but it ended with 1 of the 3 of update 0; see above whether"):
        list(next(iter(vbs.updates([[1]], run.optimizer))))


class Itself(Dataset[list[int]]):
    """A dataset whose item is its index."""

    def __getitem__(self, index):
        return index


def test_a_custom_sampler_must_be_the_batch_sampler_of_a_loader():
    run = LoggedTraining(CASE)
    wrong = DataLoader(range(40), 8, sampler=run.sampler)
    with pytest.raises(ValueError, match=r"it as sampler=, and collects batch_size=8 of them; pass it as batch_sampl"):
        vbs.updates(wrong, run.optimizer)
    for kind in (DataLoader, StatefulDataLoader):
        with pytest.raises(ValueError, match=r"as sampler=, and collects batch_size=8 of them; pass it as batch_sampl"):
            next(iter(kind(range(40), 8, sampler=run.sampler)))  # in a plain loop
        assert next(iter(kind(Itself(), batch_size=None, sampler=run.sampler)))
        assert len(next(iter(kind(range(40), batch_sampler=run.sampler))))
    for other in (CASE.sampler(run.backend.world), [[0], [1]]):
        with pytest.raises(ValueError, match=r"must read the optimizer's own sampler, but it reads another (Cus|list)"):
            vbs.updates(DataLoader(range(40), batch_sampler=other), run.optimizer)
    right = DataLoader(Itself(), batch_size=None, sampler=run.sampler)  # which collects nothing
    for update in vbs.updates(right, run.optimizer):
        for microbatch in update:
            run.take(microbatch)
    assert together([run.log]) == CASE.steps[:8]
