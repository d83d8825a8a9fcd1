"""Loops that raise: what is wrong is said, with what to do."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.loops import CASE, EACH, NOT_STEPPED, begun, epoch_steps, take, with_prefetching
from helpers.strategies import Run, read_ahead, together

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


SAME_UPDATE = r"the sampler's iteration began at {} and the optimizer is at {}; call set_epoch with the same epoch"
NOT_ITS_OWN = r"that sampler has yielded {} and this is number {}; pass the same CustomSampler to"
ANEW = r"but this iteration was begun before the optimizer moved to epoch 0, step {}; start a new loop over the loader"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("said", [(), ("sampler",), ("optimizer",), ("optimizer", "sampler", "sampler")])
def test_set_epoch_of_the_next_epoch_is_optional(workers: int, said: tuple[str, ...]) -> None:
    run = begun()
    loader = DataLoader(range(40), batch_sampler=run.sampler, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(3):
        for name in said:
            getattr(run, name).set_epoch(epoch)
        take(run, iter(loader), 100)
    assert together([run.log]) == CASE.steps


def test_raises_if_an_epoch_is_repeated_from_memory() -> None:
    run = begun()
    batches = itertools.cycle(run.sampler)
    take(run, batches, 17)
    with pytest.raises(RuntimeError, match="all updates of epoch 0 are committed; read the loader"):
        run.take(next(batches))
    run.weight.sum().backward()
    with pytest.raises(RuntimeError, match=NOT_ITS_OWN.format(17, 18)):
        run.optimizer.step()


def test_the_error_is_raised_at_the_first_read_and_not_by_iter() -> None:
    """A loader that iterates in a thread would hang: torch_xla's calls `iter` where nothing closes its queues."""
    run = Run(replace(CASE, trace=vbs.BatchTrace.from_sizes([10] * 4), epochs=1))
    take(run, iter(run.sampler), 100)
    batches = iter(run.sampler)
    for _ in range(2):
        with pytest.raises(ValueError, match="its 4 steps end in epoch 1"):
            next(batches)


@pytest.mark.parametrize("name", ["sampler", "optimizer"])
def test_set_epoch_of_one_moves_both_and_says_what_is_skipped(name: str) -> None:
    run = begun()
    skips = r"^set_epoch\(1\) skips 8 updates and 40 samples, .*; call it with optimizer.epo"
    with pytest.warns(UserWarning, match=skips):  # noqa: PT031
        getattr(run, name).set_epoch(1)
        take(run, iter(run.sampler), 100)
    assert together([run.log]) == epoch_steps(1)
    assert run.optimizer.samples == 40


@pytest.mark.parametrize("said", ["sampler", "optimizer", "sampler optimizer", "optimizer sampler optimizer"])
@pytest.mark.parametrize("ends", [{"max_updates": 11}, {"max_samples": 45}])
def test_epochs_after_the_end_of_the_training_are_empty(said: str, ends: dict[str, int]) -> None:
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
def test_states_of_optimizers_at_different_updates_are_told(order: tuple[int, int]) -> None:
    """Saved when one of the two had begun the next epoch."""

    def create() -> tuple[vbs.CustomSampler, list[torch.Tensor], list[vbs.CustomOptimizer]]:
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
def test_set_epoch_of_neither_moves_back() -> None:
    run = begun(2)
    take(run, iter(run.sampler), 5)
    for one in (run.sampler, run.optimizer):
        with pytest.raises(RuntimeError, match="epoch 0 is over and the next update is in epoch 2; loop over range"):
            one.set_epoch(0)
    run.set_epoch(2)
    take(run, iter(run.sampler), 100)
    assert together([run.log]) == epoch_steps(2)


def test_the_sampler_alone_may_be_set_to_the_next_epoch() -> None:
    run = begun()
    for epoch in range(3):
        run.sampler.set_epoch(epoch)
        take(run, iter(run.sampler), 100)
        assert run.optimizer.epoch == run.sampler.epoch == epoch + 1
    assert together([run.log]) == CASE.steps


@with_prefetching
def test_raises_if_an_update_comes_from_two_iterations(ahead: int) -> None:
    run = begun()
    take(run, read_ahead(run.sampler, ahead), 4)  # of the second update's two
    message = r"step 1 had 1 of 2 when the loader was iterated again; call optimizer.discard_step\(\) first"
    with pytest.raises(RuntimeError, match=message):
        take(run, read_ahead(run.sampler, ahead), 1)
    run.discard_step()
    take(run, read_ahead(run.sampler, ahead), 14)
    assert together([run.log]) == epoch_steps(0)


@with_prefetching
def test_set_epoch_detects_a_loop_without_step(ahead: int) -> None:
    run = begun()
    list(read_ahead(run.sampler, ahead))
    with pytest.raises(RuntimeError, match=NOT_STEPPED.format(0)):
        run.sampler.set_epoch(1)


@with_prefetching
def test_reading_the_sampler_for_something_else_harms_nothing(ahead: int) -> None:
    run = begun()
    list(read_ahead(run.sampler, ahead))
    take(run, read_ahead(run.sampler, ahead), 100)
    assert together([run.log]) == epoch_steps(0)


def test_loading_a_state_forgets_what_was_read() -> None:
    run = begun()
    list(run.sampler)
    run.sampler.load_state_dict(run.sampler.state_dict())
    take(run, iter(run.sampler), 17)
    assert together([run.log]) == epoch_steps(0)


def test_raises_if_step_is_called_before_the_first_read() -> None:
    run = begun()
    with pytest.raises(RuntimeError, match=NOT_ITS_OWN.format(0, 1)):
        run.optimizer.step()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda sampler: CASE.sampler()], ids=["a copy", "an equal one"])
def test_raises_if_the_loader_has_another_sampler(make: Callable[[vbs.CustomSampler], vbs.CustomSampler]) -> None:
    run = begun()
    loader = DataLoader(range(40), batch_sampler=make(run.sampler))
    with pytest.raises(RuntimeError, match=NOT_ITS_OWN.format(0, 1)):
        take(run, iter(loader), 1)
    run.discard_step()
    next(iter(run.sampler))  # also when its own was looked at
    take(run, iter(loader), 1)
    with pytest.raises(RuntimeError, match=NOT_ITS_OWN.format(1, 2)):
        take(run, iter(loader), 1)


def test_raises_if_the_loader_batches_microbatches() -> None:
    """`DataLoader(data, sampler=sampler, batch_size=4)` yields four of them at a time."""
    run = begun()
    loader = DataLoader(TensorDataset(torch.arange(40)), sampler=run.sampler, batch_size=4)
    with pytest.raises(RuntimeError, match=EACH.format(3) + r".* pass the sampler to the loader as batch_sampler, "):  # noqa: PT012
        for _ in loader:
            run.weight.sum().backward()
            run.optimizer.step()


def test_raises_if_an_iteration_continues_after_its_update_started_over() -> None:
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
        if number == 3 and go_back is again[1]:  # between two updates nothing starts over
            take(run, batches, 2)
            continue
        with pytest.raises(RuntimeError, match=ANEW.format(here)):
            take(run, batches, 1)
        whole = len(run.log)
        run.discard_step()
        take(run, iter(run.sampler), 100)
        assert together([run.log[whole:]]) == CASE.steps[here:8]


def test_raises_if_two_iterations_alternate() -> None:
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
def test_a_run_that_is_restored_at_the_end_of_an_epoch_goes_on(pending: bool) -> None:
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
