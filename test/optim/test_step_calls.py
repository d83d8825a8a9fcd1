"""Loops that call `step()` too rarely or too often: it is said, and nothing is in an update that should not be."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.loops import CASE, EACH, NOT_STEPPED, InThread, begun, epoch_steps, take, with_prefetching
from helpers.properties import examples
from helpers.strategies import Run, error_of, read_ahead, together

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@with_prefetching
@pytest.mark.parametrize("every", [2, 3, 4])
@pytest.mark.parametrize("first", [0, 1])
def test_raises_if_the_loop_accumulates_by_itself(every: int, first: int, ahead: int) -> None:
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


LEAVING: dict[str, Callable[[Run], object]] = {
    "set_epoch": lambda run: run.sampler.set_epoch(1),
    "a new iteration": lambda run: next(iter(run.sampler)),
    "vbs.updates": lambda run: list(next(iter(vbs.updates(run.sampler, run.optimizer)))),
}
SAVING: dict[str, Callable[[Run], object]] = {
    "done": lambda run: run.optimizer.done,
    "state_dict": lambda run: run.optimizer.state_dict(),
}


@with_prefetching
@pytest.mark.parametrize("left_out", range(17))
@pytest.mark.parametrize("then", LEAVING)
def test_raises_if_a_microbatch_is_skipped(left_out: int, ahead: int, then: str) -> None:
    """`if loss.isnan(): continue`: at the next `step()`; for the first or the last one of an epoch at its end.

    How far a loader reads ahead is not known before the first `step()`: with workers the first one is not seen.
    """
    if ahead and left_out == 0:
        return
    run = begun()

    def loop() -> None:
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
def test_a_loop_that_has_skipped_the_last_microbatch_cannot_be_saved(call: str, sizes: list[int]) -> None:
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
def test_two_steps_a_microbatch_raise_before_the_weights_change(workers: int) -> None:
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
def test_a_backward_that_a_loop_has_left_is_in_no_update(stop: int, ahead: int, by: str) -> None:
    """Ctrl-C in a notebook between `backward()` and `step()`, and the cell is run again."""
    run = begun()
    run.optimizer.param_groups[0]["lr"] = 1.0

    def backward(batch: list[int]) -> None:
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


def again(run: Run, backward: Callable[[list[int]], None]) -> None:
    for batch in run.sampler:
        backward(batch)
        run.optimizer.step()


def test_raises_if_a_loop_fed_by_a_thread_steps_too_rarely() -> None:
    run = begun()
    for number, _ in enumerate(InThread(run.sampler, 2)):
        run.weight.sum().backward()
        if number % 2:
            run.optimizer.step()
    with pytest.raises(RuntimeError, match=NOT_STEPPED.format(8)):
        run.sampler.set_epoch(1)


@pytest.mark.filterwarnings("ignore:set_epoch")
@pytest.mark.parametrize("said", [False, True])
def test_a_thread_may_have_read_the_epoch_when_the_loop_leaves_it(said: bool) -> None:
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


@with_prefetching
def test_raises_if_step_is_called_more_often_than_microbatches(ahead: int) -> None:
    run = begun()
    with pytest.raises(RuntimeError, match=r"this is number|are committed|was called 1 times more"):  # noqa: PT012
        for _ in read_ahead(run.sampler, ahead):
            for _ in range(2):
                run.weight.sum().backward()
                run.optimizer.step()
    assert run.optimizer.updates == 0 or ahead == 50  # the first update has three microbatches
