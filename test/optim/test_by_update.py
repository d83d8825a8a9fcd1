"""`vbs.updates`: a loader read update by update."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.loops import CASE, InThread
from helpers.properties import examples
from helpers.strategies import Case, Run, cases, read_ahead, together
from variable_batch_size.testing import run_ranks


class Reading:
    """A loader that reads some microbatches ahead."""

    def __init__(self, run: Run, ahead: int) -> None:
        self.run, self.ahead = run, ahead

    def __iter__(self) -> Iterator[list[int]]:
        return read_ahead(self.run.sampler, self.ahead)


def in_groups(updates: Iterator[Any], number: int) -> Iterator[Any]:
    """A framework that reads `number` + 1 updates at once."""
    while group := list(islice(updates, number + 1)):
        yield from group


def one_ahead(updates: Iterator[Any], number: int) -> Iterator[Any]:
    """A framework that reads `number` updates ahead."""
    waiting = deque[Any]()
    for update in updates:
        waiting.append(update)
        if len(waiting) > number:
            yield waiting.popleft()
    yield from waiting


Reader = Callable[[Iterator[Any], int], Iterator[Any]]
readers = st.sampled_from([one_ahead, in_groups])


@given(cases(largest_dataset=60), st.integers(1, 4), st.integers(0, 20), readers, st.integers(0, 3), st.booleans())
@examples(80)
def test_a_loop_over_updates_trains_like_one_over_microbatches(
    case: Case, size: int, loader_ahead: int, reader: Reader, framework_ahead: int, once: bool
) -> None:
    def train(backend: vbs.Backend) -> Run:
        run = Run(case, backend)
        loader = Reading(run, loader_ahead)
        of_all = vbs.updates(loader, run.optimizer)
        for epoch in range(case.epochs):
            updates = of_all if once else vbs.updates(loader, run.optimizer)
            assert len(updates) == len(case.updates[epoch])
            made = 0
            for update in reader(iter(updates), framework_ahead):
                assert len(updates) == len(case.updates[epoch])
                results = [run.take(microbatch) for microbatch in update]
                assert results == [False] * (len(results) - 1) + [True]
                made += 1
            assert made == len(case.updates[epoch])
        return run

    assert together(run.log for run in run_ranks(train, size)) == case.steps


@given(cases(largest_dataset=60), st.integers(0, 20), st.data())
@examples(60)
def test_it_continues_after_a_restore_and_its_length_is_that_of_the_whole_epoch(
    case: Case, ahead: int, data: st.DataObject
) -> None:
    stop = data.draw(st.integers(0, len(case.steps)), label="stop")
    begun, run = Run(case).train(updates=stop), Run(case)
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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_breaks_continues_with_the_next_update(workers: int) -> None:
    run = Run(CASE)
    loader = DataLoader(range(40), batch_sampler=run.sampler, num_workers=workers)
    while run.optimizer.epoch < 2:
        for update in islice(vbs.updates(loader, run.optimizer), 3):
            for microbatch in update:
                run.take(microbatch)
    assert together([run.log]) == CASE.steps[:16]


def test_a_loader_that_reads_in_a_thread() -> None:
    run = Run(CASE)
    updates = vbs.updates(InThread(run.sampler, 5), run.optimizer)
    for _ in range(CASE.epochs):
        for update in updates:
            for microbatch in update:
                run.take(microbatch)
    assert together([run.log]) == CASE.steps


def test_the_loop_may_leave_in_the_middle_of_an_update() -> None:
    run = Run(CASE)
    first, *_ = vbs.updates(Reading(run, 0), run.optimizer)
    run.take(first[0])
    run.discard_step()
    for update in vbs.updates(Reading(run, 0), run.optimizer):
        for microbatch in update:
            run.take(microbatch)
    assert together([run.log]) == CASE.steps[:8]


@given(cases(largest_dataset=40), st.integers(1, 3))
@examples(30)
def test_two_optimizers_take_turns_at_each_update(case: Case, size: int) -> None:
    """As in a GAN whose generator meets the updated discriminator: each update of both uses the same samples."""

    def train(backend: vbs.Backend) -> tuple[list[list[int]], list[list[int]]]:
        sampler = case.sampler(backend.world)
        weights = [torch.nn.Parameter(torch.zeros(())) for _ in range(2)]
        optimizers = [
            vbs.ConstantOptimizer(torch.optim.SGD([weight], lr=0.0), sampler, backend=backend) for weight in weights
        ]
        used: tuple[list[list[int]], list[list[int]]] = ([], [])
        for _ in vbs.remaining_epochs(sampler, optimizers, case.epochs):
            for update in vbs.updates(sampler, optimizers[0]):
                for log, weight, optimizer in zip(used, weights, optimizers, strict=True):
                    for microbatch in update:
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


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_microbatch_of_an_update_that_is_skipped_raises(skipped: int) -> None:
    run = Run(CASE)

    def loop() -> None:
        for number, update in enumerate(vbs.updates(Reading(run, 0), run.optimizer)):
            for round_index, microbatch in enumerate(update):
                if (number, round_index) != (2, skipped):
                    (run.weight * len(microbatch)).backward()
                    run.optimizer.step()

    with pytest.raises(RuntimeError, match="update 2 is not complete and update 3 is read; call step"):
        loop()


@pytest.mark.parametrize("sizes", [[40], [20], [15]])  # of one, two and three updates in an epoch
@pytest.mark.parametrize("wrong", ["first microbatch only", "skips the first update", "skips the last update"])
def test_a_wrong_loop_raises_when_the_next_epoch_begins_at_the_latest(sizes: list[int], wrong: str) -> None:
    run = Run(replace(CASE, trace=vbs.BatchTrace.from_sizes(sizes, on_end="hold")))

    def loop() -> None:
        for _ in range(2):
            for number, update in enumerate(vbs.updates(Reading(run, 0), run.optimizer)):
                skipped = (wrong == "skips the first update" and number == 0) or (
                    wrong == "skips the last update" and number == -(-40 // sizes[0]) - 1
                )
                for microbatch in () if skipped else update[:1] if wrong.startswith("first") else update:
                    (run.weight * len(microbatch)).backward()
                    run.optimizer.step()

    with pytest.raises(RuntimeError, match=r"every microbatch of an update must reach optimizer.step"):
        loop()
    run.discard_step()
    for update in vbs.updates(Reading(run, 0), run.optimizer):
        assert update


def test_a_loader_of_something_else_raises() -> None:
    run = Run(CASE)
    with pytest.raises(RuntimeError, match=r"of the optimizer's sampler, but it yields more than epoch 0 has"):
        list(vbs.updates([[1]] * 99, run.optimizer))
    with pytest.raises(RuntimeError, match=r"but it ended with 1 of the 3 of update 0; create it with batch_sampler"):
        next(iter(vbs.updates([[1]], run.optimizer)))


def test_rejects_wrong_arguments_at_once() -> None:
    run = Run(CASE)
    with pytest.raises(TypeError, match=r"optimizer must be a vbs.CustomOptimizer, got"):
        vbs.updates(Reading(run, 0), run.sampler)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loader must be iterable, got"):
        vbs.updates(3, run.optimizer)  # type: ignore[arg-type]
