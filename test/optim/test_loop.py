"""Loops that work as in PyTorch: prefetching, leaving an epoch early, several optimizers."""

import itertools

import pytest
import torch

import variable_batch_size as vbs
from helpers.loops import CASE, InThread, begun, epoch_steps, take, with_prefetching
from helpers.runs import LoggedTraining, read_ahead, together

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


READERS = {
    "the whole epoch at once": lambda sampler: iter(list(sampler)),
    "one ahead": lambda sampler: (one for one, _ in itertools.pairwise(itertools.chain(sampler, [None]))),
    "in a thread": lambda sampler: iter(InThread(sampler, 4)),
    "in a thread, without bound": lambda sampler: iter(InThread(sampler, 0)),
    "a loader's workers": lambda sampler: read_ahead(sampler, 5),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_loop_may_prefetch_any_constant_number(kind):
    run = LoggedTraining(CASE)
    for epoch in range(CASE.epochs):
        run.set_epoch(epoch)
        for batch in READERS[kind](run.sampler):
            run.take(batch)
    assert together([run.log]) == CASE.steps


@pytest.mark.filterwarnings("ignore:set_epoch")
@with_prefetching
@pytest.mark.parametrize("in_hand", [0, 1])
def test_an_epoch_may_end_after_any_microbatch(in_hand, ahead):
    """Behind `step()`, or before it with the next microbatch in hand; but the last one would count as skipped."""
    for stop in range(1, 18):
        if ahead and in_hand and stop == 16:
            continue
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
def test_peeking_at_the_data_disturbs_no_iteration(ahead):
    run = LoggedTraining(CASE)
    for epoch in range(CASE.epochs):
        run.set_epoch(epoch)
        for batch in read_ahead(run.sampler, ahead):
            run.take(batch)
            if not run.sampler.batches.ends_epoch(run.sampler.position):
                twin = CASE.sampler()
                twin.load_state_dict(run.sampler.state_dict())
                assert next(read_ahead(run.sampler, ahead)) == next(iter(twin))
    assert together([run.log]) == CASE.steps


def test_another_optimizer_continues_at_the_samplers_position():
    run = begun()
    take(run, iter(run.sampler), 5)
    run.optimizer = vbs.ConstantOptimizer(torch.optim.SGD([run.weight], lr=0.0), run.sampler)
    assert run.optimizer.updates == 2
    take(run, iter(run.sampler), 12)
    assert together([run.log]) == epoch_steps(0)


def test_a_loop_that_reads_whole_updates_is_told_of_vbs_updates():
    run = begun()
    batches = iter(run.sampler)
    run.take(next(batches))
    take(run, batches, 2)
    both = list(itertools.islice(batches, 2))
    with pytest.raises(RuntimeError, match=r"1 of those that were read .* read several only by vbs.updates, and"):
        run.take(both[0])
    assert run.optimizer.updates == 1
