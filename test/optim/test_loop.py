"""A user's loop around sampler and optimizer: what works as in PyTorch, and what is refused, none of it in silence."""

from __future__ import annotations

import copy
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.reference import examples
from helpers.strategies import Case, Run, read_ahead, refused, rows_of, together
from variable_batch_size.data.shuffle import order

CASE = Case(vbs.BatchTrace.from_sizes([7, 3, 12, 1, 5], on_end="cycle"), 40, 4, False, True, seed=3, epochs=3)
# Microbatches of the updates: 3 2 3 1 2 3 2 1 (17), then 1 2 3 2 3 1 2 2 (16), then 2 3 1 2 3 2 3 (16).

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
with_prefetching = pytest.mark.parametrize("ahead", [0, 1, 3, 50])


def epoch_steps(*epochs: int) -> list[tuple[int, int, list[int]]]:
    return [step for step in CASE.steps if step[0] in epochs]


def begun(epoch: int = 0) -> Run:
    run = Run(CASE)
    run.set_epoch(epoch)
    return run


def take(run: Run, batches: Iterator[list[int]], number: int) -> None:
    for batch in itertools.islice(batches, number):
        run.take(batch)


class InThread:
    """A loader that reads in a thread of its own, up to `size` microbatches ahead, as torch_xla's does."""

    def __init__(self, sampler: vbs.CustomSampler, size: int) -> None:
        self.sampler, self.size = sampler, size

    def __iter__(self) -> Iterator[list[int]]:
        waiting: queue.Queue[list[int] | None] = queue.Queue(self.size)

        def read() -> None:
            try:
                for batch in self.sampler:
                    waiting.put(batch)
            finally:
                waiting.put(None)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        while (batch := waiting.get()) is not None:
            yield batch
        thread.join()


# ---------------------------------------------------------------------------------------- what works as in PyTorch


READERS: dict[str, Callable[[vbs.CustomSampler], Any]] = {
    "the whole epoch at once": lambda sampler: iter(list(sampler)),
    "several at a time": lambda sampler: itertools.chain.from_iterable(chunks(iter(sampler), 3)),
    "one ahead": lambda sampler: (one for one, _ in itertools.pairwise(itertools.chain(sampler, [None]))),
    "in a thread": lambda sampler: iter(InThread(sampler, 4)),
    "in a thread, without bound": lambda sampler: iter(InThread(sampler, 0)),
    "a loader's workers": lambda sampler: read_ahead(sampler, 5),
}


def chunks(source: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while chunk := list(itertools.islice(source, size)):
        yield chunk


@pytest.mark.parametrize("kind", READERS)
def test_a_loop_may_read_ahead_in_any_constant_way(kind: str) -> None:
    run = Run(CASE)
    for epoch in range(CASE.epochs):
        run.set_epoch(epoch)
        for batch in READERS[kind](run.sampler):
            run.take(batch)
    assert together([run.log]) == CASE.steps


@with_prefetching
@pytest.mark.parametrize("in_hand", [0, 1])
def test_an_epoch_may_be_left_after_any_microbatch(in_hand: int, ahead: int) -> None:
    """Behind `step()`, or before it with the next microbatch in hand."""
    for stop in range(1, 18):
        run = begun()
        batches = read_ahead(run.sampler, ahead)
        take(run, batches, stop)
        list(itertools.islice(batches, in_hand))
        whole = len(run.log)
        assert run.log == [entry for entry in run.log if entry[1] < run.optimizer.updates]
        run.set_epoch(1)
        take(run, read_ahead(run.sampler, ahead), 16)
        first = together([run.log[:whole]])
        assert first == CASE.steps[: len(first)]
        assert together([run.log[whole:]]) == epoch_steps(1)


@with_prefetching
def test_a_look_at_the_data_disturbs_no_iteration(ahead: int) -> None:
    run = Run(CASE)
    for epoch in range(CASE.epochs):
        run.set_epoch(epoch)
        for batch in read_ahead(run.sampler, ahead):
            run.take(batch)
            if len(run.sampler):
                twin = CASE.sampler()
                twin.load_state_dict(run.sampler.state_dict())
                assert next(read_ahead(run.sampler, ahead)) == next(iter(twin))
    assert together([run.log]) == CASE.steps


@with_prefetching
def test_set_epoch_may_be_called_on_either_first(ahead: int) -> None:
    run = Run(CASE)
    for epoch in range(CASE.epochs):
        run.optimizer.set_epoch(epoch)
        run.sampler.set_epoch(epoch)
        take(run, read_ahead(run.sampler, ahead), 17)
    assert together([run.log]) == CASE.steps


def test_an_iteration_that_was_broken_off_between_updates_may_go_on() -> None:
    run = begun()
    batches = iter(run.sampler)
    take(run, batches, 5)
    assert run.optimizer.updates == 2
    take(run, batches, 12)
    assert together([run.log]) == epoch_steps(0)


def test_reading_twice_before_there_is_an_optimizer_is_reading_twice() -> None:
    sampler = CASE.sampler()
    assert list(sampler) == list(sampler)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD([weight]), sampler)
    sampler.set_epoch(0)
    for _ in sampler:
        weight.sum().backward()
        optimizer.step()
    assert optimizer.updates == 8


def test_another_optimizer_goes_on_where_the_sampler_stands() -> None:
    run = begun()
    take(run, iter(run.sampler), 5)
    run.optimizer = vbs.ConstantOptimizer(torch.optim.SGD([run.weight], lr=0.0), run.sampler)
    assert run.optimizer.updates == 2
    take(run, iter(run.sampler), 12)
    assert together([run.log]) == epoch_steps(0)


@with_prefetching
def test_two_optimizers_may_share_a_sampler_when_both_take_every_microbatch(ahead: int) -> None:
    run = Run(CASE)
    weight = torch.zeros(1, requires_grad=True)
    other = vbs.ConstantOptimizer(torch.optim.SGD([weight]), run.sampler)
    for epoch in range(CASE.epochs):
        run.set_epoch(epoch)
        other.set_epoch(epoch)
        for batch in read_ahead(run.sampler, ahead):
            run.take(batch)
            weight.sum().backward()
            other.step()
    assert together([run.log]) == CASE.steps
    assert other.updates == run.optimizer.updates


def test_a_loader_may_be_made_anew_between_updates() -> None:
    run = begun()
    take(run, iter(DataLoader(range(40), batch_sampler=run.sampler)), 5)
    take(run, iter(DataLoader(range(40), batch_sampler=run.sampler, num_workers=2)), 12)
    assert together([run.log]) == epoch_steps(0)


def test_a_loader_without_batches_of_its_own_may_take_the_sampler_as_sampler() -> None:
    run, data = begun(), TensorDataset(torch.arange(40))
    for (batch,) in DataLoader(data, sampler=run.sampler, batch_size=None):
        run.take(batch)
    assert together([run.log]) == epoch_steps(0)


# ------------------------------------------------------------------------------------------------- what is refused

SAME_UPDATE = r"the sampler's iteration began at {} and the optimizer stands at {}; call set_epoch with the same epoch"
EPOCH_OVER = r"epoch 0 has had all of them; call set_epoch\(1\) on the sampler and on the optimizer"
EACH = r"^step\(\) must follow the backward\(\) of every microbatch, but {} of those that were read .*; call it once"
NOT_STEPPED = r"was read from epoch 0, step 0 to the end, 17 microbatches, with {} calls of step\(\); call it once"
NOT_ITS_OWN = r"that sampler has yielded {} and this is number {}; give the same CustomSampler to"
ANEW = r"but this one was read further before epoch 0, step {} was gone to; iterate the loader anew after"


@with_prefetching
def test_a_second_epoch_without_set_epoch(ahead: int) -> None:
    run = begun()
    take(run, read_ahead(run.sampler, ahead), 17)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=EPOCH_OVER):
            next(read_ahead(run.sampler, ahead))
    run.set_epoch(1)
    take(run, read_ahead(run.sampler, ahead), 16)
    assert together([run.log]) == epoch_steps(0, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_epoch_of_a_loader_without_set_epoch(workers: int) -> None:
    run = begun()
    loader = DataLoader(range(40), batch_sampler=run.sampler, num_workers=workers, persistent_workers=workers > 0)
    take(run, iter(loader), 17)
    with pytest.raises(RuntimeError, match=EPOCH_OVER):
        next(iter(loader))
    run.set_epoch(1)
    take(run, iter(loader), 16)
    assert together([run.log]) == epoch_steps(0, 1)


def test_an_epoch_that_is_repeated_from_memory() -> None:
    run = begun()
    batches = itertools.cycle(run.sampler)
    take(run, batches, 17)
    with pytest.raises(RuntimeError, match=EPOCH_OVER.replace(" before.*", "")):
        run.take(next(batches))


def test_the_refusal_comes_with_the_first_microbatch_and_not_in_iter() -> None:
    """A loader that iterates in a thread would hang: torch_xla's calls `iter` where nothing closes its queues."""
    run = begun()
    take(run, iter(run.sampler), 17)
    batches = iter(run.sampler)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=EPOCH_OVER):
            next(batches)


def test_set_epoch_on_the_sampler_only() -> None:
    run = begun()
    run.sampler.set_epoch(1)
    with pytest.raises(RuntimeError, match=SAME_UPDATE.format("epoch 1, step 8", "epoch 0, step 0")):
        take(run, iter(run.sampler), 1)
    run = begun()
    take(run, iter(run.sampler), 17)
    run.sampler.set_epoch(1)
    with pytest.raises(RuntimeError, match=EPOCH_OVER):
        run.optimizer.step()


def test_set_epoch_on_the_optimizer_only() -> None:
    run = begun()
    run.optimizer.set_epoch(1)
    with pytest.raises(RuntimeError, match=SAME_UPDATE.format("epoch 0, step 0", "epoch 1, step 8")):
        take(run, iter(run.sampler), 1)
    run = begun()
    take(run, iter(run.sampler), 17)
    run.optimizer.set_epoch(1)
    with pytest.raises(RuntimeError, match=EPOCH_OVER):
        take(run, iter(run.sampler), 1)


def test_back_in_time_on_one_of_the_two() -> None:
    for one in ("sampler", "optimizer"):
        run = begun(2)
        take(run, iter(run.sampler), 5)
        getattr(run, one).set_epoch(0)
        here, there = ("epoch 0, step 0", "epoch 2, step 18")[:: 1 if one == "sampler" else -1]
        with pytest.raises(RuntimeError, match=SAME_UPDATE.format(here, there)):
            take(run, iter(run.sampler), 1)


@with_prefetching
def test_an_update_from_two_iterations(ahead: int) -> None:
    run = begun()
    take(run, read_ahead(run.sampler, ahead), 4)  # of the second update's two
    message = r"step 1 had 1 of 2 when the loader was iterated anew; call optimizer.discard_step\(\) before it"
    with pytest.raises(RuntimeError, match=message):
        take(run, read_ahead(run.sampler, ahead), 1)
    run.discard_step()
    take(run, read_ahead(run.sampler, ahead), 14)
    assert together([run.log]) == epoch_steps(0)


@with_prefetching
def test_a_loop_without_step_is_found_by_set_epoch(ahead: int) -> None:
    run = begun()
    list(read_ahead(run.sampler, ahead))
    with pytest.raises(RuntimeError, match=NOT_STEPPED.format(0)):
        run.sampler.set_epoch(1)


@with_prefetching
def test_a_loop_without_step_is_found_by_the_next_iteration(ahead: int) -> None:
    run = begun()
    list(read_ahead(run.sampler, ahead))
    with pytest.raises(RuntimeError, match=NOT_STEPPED.format(0)):
        list(read_ahead(run.sampler, ahead))


def test_a_state_makes_forget_what_was_read() -> None:
    run = begun()
    list(run.sampler)
    run.sampler.load_state_dict(run.sampler.state_dict())
    take(run, iter(run.sampler), 17)
    assert together([run.log]) == epoch_steps(0)


@with_prefetching
@pytest.mark.parametrize("every", [2, 3, 4])
@pytest.mark.parametrize("first", [0, 1])
def test_accumulating_by_hand(every: int, first: int, ahead: int) -> None:
    """`if number % every == 0: optimizer.step()`: refused at the second call."""
    run = begun()
    calls = 0
    with pytest.raises(RuntimeError, match=EACH.format(every - 1)):  # noqa: PT012
        for number, _ in enumerate(read_ahead(run.sampler, ahead)):
            run.weight.sum().backward()
            if number % every == (every - 1) * first:
                calls += 1
                run.optimizer.step()
    assert calls == 2


@with_prefetching
@pytest.mark.parametrize("left_out", range(1, 17))
def test_a_microbatch_that_is_left_out(left_out: int, ahead: int) -> None:
    """`if loss.isnan(): continue`: refused at the next call, and after an epoch's last microbatch by set_epoch."""
    run = begun()

    def loop() -> None:
        for number, batch in enumerate(read_ahead(run.sampler, ahead)):
            if number != left_out:
                run.take(batch)
            assert number <= left_out
        if not ahead:
            run.set_epoch(1)

    refusal = refused(loop)
    if left_out < 16:
        assert refusal is not None
        assert refusal.startswith(
            "step() must follow the backward() of every microbatch, but 1 of those that were read"
        )
    elif not ahead:
        assert refusal is not None
        assert "17 microbatches, with 16 calls of step()" in refusal
    run.log = [entry for entry in run.log if entry[1] < run.optimizer.updates]
    assert together([run.log]) == CASE.steps[: run.optimizer.updates]


def test_a_thread_that_reads_for_a_loop_that_steps_too_rarely() -> None:
    run = begun()
    for number, _ in enumerate(InThread(run.sampler, 2)):
        run.weight.sum().backward()
        if number % 2:
            run.optimizer.step()
    with pytest.raises(RuntimeError, match=NOT_STEPPED.format(8)):
        run.sampler.set_epoch(1)


@pytest.mark.parametrize("said", [False, True])
def test_a_thread_that_has_read_all_when_the_epoch_is_left(said: bool) -> None:
    """Of such a loader nobody knows how far it reads ahead; `discard_step()` says that the epoch is left on purpose."""
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


@with_prefetching
def test_step_more_often_than_microbatches(ahead: int) -> None:
    run = begun()
    with pytest.raises(RuntimeError, match=r"this is number|had all of them"):  # noqa: PT012
        for _ in read_ahead(run.sampler, ahead):
            for _ in range(2):
                run.weight.sum().backward()
                run.optimizer.step()
    if not ahead:
        assert run.optimizer.updates == 0  # the first update has three microbatches


def test_step_before_anything_was_read() -> None:
    run = begun()
    with pytest.raises(RuntimeError, match=NOT_ITS_OWN.format(0, 1)):
        run.optimizer.step()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda sampler: CASE.sampler()], ids=["a copy", "an equal one"])
def test_a_loader_with_another_sampler(make: Callable[[vbs.CustomSampler], vbs.CustomSampler]) -> None:
    run = begun()
    loader = DataLoader(range(40), batch_sampler=make(run.sampler))
    with pytest.raises(RuntimeError, match=NOT_ITS_OWN.format(0, 1)):
        take(run, iter(loader), 1)
    next(iter(run.sampler))  # also when its own was looked at
    take(run, iter(loader), 1)
    with pytest.raises(RuntimeError, match=NOT_ITS_OWN.format(1, 2)):
        take(run, iter(loader), 1)


def test_a_loader_that_makes_batches_of_microbatches() -> None:
    """`DataLoader(data, sampler=sampler, batch_size=4)` yields four of them at a time."""
    run = begun()
    loader = DataLoader(TensorDataset(torch.arange(40)), sampler=run.sampler, batch_size=4)
    with pytest.raises(RuntimeError, match=EACH.format(3) + r".* batch_sampler$"):  # noqa: PT012
        for _ in loader:
            run.weight.sum().backward()
            run.optimizer.step()


def test_an_iteration_goes_on_after_what_begins_its_update_again() -> None:
    def load(run: Run) -> None:
        run.discard_step()
        run.optimizer.load_state_dict(saved)

    saved = copy.deepcopy(begun().optimizer.state_dict())
    again: list[Callable[[Run], None]] = [Run.discard_step, lambda run: run.set_epoch(0), load]
    for number, go_back in itertools.product((1, 2, 3, 4), again):
        run = begun()
        batches = iter(run.sampler)
        take(run, batches, number)
        go_back(run)
        here = run.optimizer.updates
        with pytest.raises(RuntimeError, match=ANEW.format(here)):
            take(run, batches, 1)
        whole = len(run.log)
        take(run, iter(run.sampler), 100)
        assert together([run.log[whole:]]) == CASE.steps[here:8]


def test_turns_of_two_iterations() -> None:
    run = begun()
    one = iter(run.sampler)
    take(run, one, 3)
    other = iter(run.sampler)
    take(run, other, 2)
    with pytest.raises(RuntimeError, match=SAME_UPDATE.format("epoch 0, step 0", "epoch 0, step 2")):
        take(run, one, 1)
    take(run, other, 100)
    assert together([run.log]) == epoch_steps(0)


def test_an_empty_rest_may_be_read_only_once() -> None:
    """A run that is restored at an epoch's end, in a loop that forgets set_epoch, would train on nothing for ever."""
    run = Run(CASE)
    run.optimizer.load_state_dict(Run(CASE).go_on(updates=8).optimizer.state_dict())
    assert list(run.sampler) == []
    with pytest.raises(RuntimeError, match=EPOCH_OVER):
        list(run.sampler)
    run.set_epoch(1)
    take(run, iter(run.sampler), 16)
    assert together([run.log]) == epoch_steps(1)


# ----------------------------------------------------------------------------------------------------- any misuse


class Fuzz:
    """A user who calls anything at any time, and a rank that may notice."""

    def __init__(self, case: Case, ahead: int) -> None:
        self.run, self.ahead = Run(case), ahead
        self.iterations: list[Iterator[list[int]]] = []
        self.begun: set[int] = set()  # the iterations of which a microbatch came
        self.state = copy.deepcopy(self.run.optimizer.state_dict())

    def begin(self, _: int) -> None:
        self.iterations.append(read_ahead(self.run.sampler, self.ahead))

    def look(self, _: int) -> None:
        next(read_ahead(self.run.sampler, self.ahead), None)

    def train(self, which: int) -> None:
        if not self.iterations:
            return
        number = (len(self.iterations) - 1) * (which > 0)  # the newest or the oldest
        batch = next(self.iterations[number], None)
        if batch is not None:
            due = self.due()
            self.run.weight.sum().backward()
            self.run.optimizer.step()
            assert batch == due
            self.begun.add(number)

    def due(self) -> list[int]:
        """Rows of the microbatch that the optimizer says it takes."""
        case, optimizer = self.run.case, self.run.optimizer
        microbatch = optimizer.microbatch
        samples = order(case.dataset_size, case.seed, optimizer.epoch)(np.arange(case.dataset_size))
        rows = rows_of(microbatch.start, microbatch.samples, case.minibatch_size, case.fixed_shape)
        return samples[rows].tolist()

    def leave_out(self, which: int) -> None:
        """Read without training, once training on the iteration has begun: before, it is a loader's reading ahead."""
        if len(self.iterations) - 1 in self.begun:
            next(self.iterations[-1], None)

    def sampler_epoch(self, epoch: int) -> None:
        self.run.sampler.set_epoch(epoch)

    def optimizer_epoch(self, epoch: int) -> None:
        self.run.optimizer.set_epoch(epoch)

    def both_epochs(self, epoch: int) -> None:
        self.run.set_epoch(epoch)

    def discard(self, _: int) -> None:
        self.run.optimizer.discard_step()

    def save(self, _: int) -> None:
        self.state = copy.deepcopy(self.run.optimizer.state_dict())

    def load(self, which: int) -> None:
        if which != 1:
            self.run.optimizer.load_state_dict(self.state)
        if which != 2:
            self.run.sampler.load_state_dict({**self.run.sampler.state_dict(), **position(self.state)})


def position(state: dict[str, Any]) -> dict[str, int]:
    return {key: state["vbs"][key] for key in ("epoch", "step")}


CALLS = [Fuzz.train] * 6 + [Fuzz.begin, Fuzz.begin, Fuzz.look, Fuzz.leave_out, Fuzz.sampler_epoch, Fuzz.optimizer_epoch]
CALLS += [Fuzz.both_epochs, Fuzz.discard, Fuzz.save, Fuzz.load]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(9, 20),
    st.sampled_from([0, 0, 1, 4]),
    st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 2)), min_size=4, max_size=30),
)
@examples(400)
def test_no_order_of_calls_trains_on_what_is_not_due(
    sizes: list[int], dataset_size: int, ahead: int, calls: list[tuple[Callable[[Fuzz, int], None], int]]
) -> None:
    trace = vbs.BatchTrace.from_sizes(sizes, on_end="cycle")
    fuzz = Fuzz(Case(trace, dataset_size, 4, False, True, 0, 3), ahead)
    fuzz.begin(0)
    for call, argument in calls:
        refused(lambda call=call, argument=argument: call(fuzz, argument))
