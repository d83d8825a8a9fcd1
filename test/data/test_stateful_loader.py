"""torchdata's StatefulDataLoader over the sampler: saved anywhere, restored beside the optimizer, it loses nothing."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.runs import Case, Run, cases, error_of, read_ahead, together
from variable_batch_size.testing import run_ranks
from variable_batch_size.world import World

CASE = Case(vbs.BatchTrace.from_sizes([7, 3, 12, 1, 5], on_end="cycle"), 40, 4, False, True, seed=3, epochs=3)
# Microbatches of the updates: 3 2 3 1 2 3 2 1, then 1 2 3 2 3 1 2 2, then 2 3 1 2 3 2 3.
OPTIONS = [
    {"num_workers": 0, "snapshot_every_n_steps": 1},
    {"num_workers": 0, "snapshot_every_n_steps": 3},
    {"num_workers": 2, "snapshot_every_n_steps": 1},
    {"num_workers": 2, "snapshot_every_n_steps": 3, "prefetch_factor": 1},
    {"num_workers": 2, "snapshot_every_n_steps": 3, "prefetch_factor": 5, "persistent_workers": True},
]
with_options = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(str(int(v)) for v in o.values()))
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def stateful(run, **options):
    return StatefulDataLoader(range(run.case.dataset_size), batch_sampler=run.sampler, **options)


def microbatches(run, loader):
    """Train to the end of the last epoch; yields after every microbatch whether it ended an update."""
    for epoch in range(run.optimizer.epoch, run.case.epochs):
        run.set_epoch(epoch)
        for batch in loader:
            yield run.take(batch)


def saved_after(updates, options, case=CASE):
    """A run that stopped, and the states of its loader and of its optimizer."""
    run = Run(case)
    loader = stateful(run, **options)
    for updated in microbatches(run, loader):
        updates -= updated
        if updates == 0:
            break
    return run, copy.deepcopy(loader.state_dict()), copy.deepcopy(run.optimizer.state_dict())


@with_options
@pytest.mark.parametrize(("stop", "loader_first"), [(5, False), (8, True), (22, True)])
def test_resumes_with_the_remaining_microbatches(options, stop, loader_first):
    """8 is the last update of an epoch, whose end the loader has not met; 22 is the last but one of all."""
    begun, of_loader, of_optimizer = saved_after(stop, options)
    run = Run(CASE)
    loader = stateful(run, **options)
    if loader_first:
        loader.load_state_dict(of_loader)
    run.optimizer.load_state_dict(of_optimizer)
    if not loader_first:
        loader.load_state_dict(of_loader)
    list(microbatches(run, loader))
    assert together([begun.log]) == CASE.steps[:stop]
    assert together([run.log]) == CASE.steps[stop:]


def test_the_initial_state_may_be_saved_before_the_first_epoch():
    run = Run(CASE)
    loader = stateful(run, num_workers=2)
    initial = copy.deepcopy(loader.state_dict())
    list(microbatches(run, loader))
    assert together([run.log]) == CASE.steps
    run = Run(CASE)
    loader = stateful(run, num_workers=2)
    loader.load_state_dict(initial)
    list(microbatches(run, loader))
    assert together([run.log]) == CASE.steps


@with_options
@pytest.mark.parametrize("again", [False, True])
def test_a_loader_read_to_the_end_continues_with_the_next_epoch(options, again):
    """Whether or not it is set once more before it."""
    begun = Run(CASE)
    loader = stateful(begun, **options)
    begun.set_epoch(0)
    for batch in loader:
        begun.take(batch)
    states = copy.deepcopy((loader.state_dict(), begun.optimizer.state_dict()))
    run = Run(CASE)
    loader = stateful(run, **options)
    loader.load_state_dict(states[0])
    run.optimizer.load_state_dict(states[1])
    for epoch in (1, 2):
        run.set_epoch(epoch)
        if again:
            run.set_epoch(epoch)
        for batch in loader:
            run.take(batch)
    assert together([begun.log]) + together([run.log]) == CASE.steps


@given(cases(largest_dataset=40), st.data())
@examples(50)
def test_a_loader_without_workers_resumes_with_another_minibatch_size(case, data):
    stop = data.draw(st.integers(1, len(case.steps)))
    _, of_loader, of_optimizer = saved_after(stop, OPTIONS[data.draw(st.integers(0, 1))], case)
    run = Run(case, minibatch_size=data.draw(st.integers(1, 64)))
    loader = stateful(run)
    loader.load_state_dict(of_loader)
    run.optimizer.load_state_dict(of_optimizer)
    list(microbatches(run, loader))
    assert together([run.log]) == case.steps[stop:]


# ---------------------------------------------------------------------------- what torchdata does, without processes


class Resumed:
    """A loader that resumes from an iterator's snapshot, reads forward and prefetches; later a plain loader."""

    def __init__(self, run, snapshot, forward, ahead):
        self.sampler, self.snapshot, self.forward, self.ahead = run.sampler, snapshot, forward, ahead

    def __iter__(self):
        if self.snapshot:
            iter(self.sampler)
            self.sampler.load_state_dict(self.sampler.state_dict())
        batches = read_ahead(self.sampler, self.ahead, self.snapshot)
        for _ in range(self.forward):
            next(batches, None)
        self.snapshot, self.forward = {}, 0
        return batches


@dataclass(frozen=True)
class Moment:
    """After how many microbatches and updates of an epoch, with the state of the sampler's iterator then."""

    epoch: int
    microbatch: int
    updates: int
    ends_update: bool
    iterator: dict[str, int]
    optimizer: dict[str, Any]  # of the last whole update


def moments(case, backend=None):
    """All of a training."""
    run, result = Run(case, backend), []
    updates, optimizer = 0, copy.deepcopy(run.optimizer.state_dict())
    for epoch in range(case.epochs):
        run.set_epoch(epoch)
        batches = iter(run.sampler)
        for number, batch in enumerate(batches, 1):
            updated = run.take(batch)
            if updated:
                updates, optimizer = updates + 1, copy.deepcopy(run.optimizer.state_dict())
            result.append(Moment(epoch, number, updates, updated, batches.state_dict(), optimizer))
    return result


def rest_of(case, moment, *snapshot, minibatch_size=None):
    run = Run(case, minibatch_size=minibatch_size)
    run.optimizer.load_state_dict(moment.optimizer)
    list(microbatches(run, Resumed(run, *snapshot)))
    return together([run.log])


def test_a_loader_that_resumes_where_the_training_ends_reads_nothing():
    case = Case(vbs.BatchTrace.from_sizes([2] * 20), 2, 1, False, False, seed=0, epochs=3, max_updates=1)
    first, last = moments(case)
    assert rest_of(case, last, first.iterator, 1, 0) == []


@given(cases(largest_dataset=30), st.integers(0, 12), st.data())
@examples(60)
def test_reading_forward_from_an_older_snapshot_reaches_the_update(case, ahead, data):
    every = moments(case)
    stop = data.draw(st.sampled_from([moment for moment in every if moment.ends_update]))
    older = [moment for moment in every if moment.epoch == stop.epoch and moment.microbatch <= stop.microbatch]
    snapshot = data.draw(st.sampled_from(older))
    forward = stop.microbatch - snapshot.microbatch
    last = [update for of_epoch in case.updates for update in of_epoch][stop.updates - 1]
    shortened = not case.is_complete(stop.epoch) and last not in case.endless[stop.epoch]
    with pytest.raises(ValueError, match="the same update, but") if shortened and forward else nullcontext():
        assert rest_of(case, stop, snapshot.iterator, forward, ahead) == case.steps[stop.updates :]


def test_reading_forward_counts_the_rounds_of_its_world():
    """On three ranks a batch of 17 takes two rounds of each, although five microbatches would do."""
    case = replace(CASE, trace=vbs.BatchTrace.from_sizes([17, 3, 20], on_end="hold"), fixed_shape=False)

    def train(backend):
        every = moments(case, backend)
        stop = next(moment for moment in every if moment.updates == 2)
        run = Run(case, backend)
        run.optimizer.load_state_dict(stop.optimizer)
        list(microbatches(run, Resumed(run, every[0].iterator, stop.microbatch - 1, 0)))
        return run.log

    assert together(run_ranks(train, 3)) == case.steps[2:]


@given(cases(largest_dataset=30), st.integers(0, 12), st.data())
@examples(60)
def test_a_snapshot_is_read_forward_only_with_its_own_split(case, ahead, data):
    """What was one microbatch may be several for another `minibatch_size`; at the update itself it does not matter."""
    every = moments(case)
    ends = [sum(map(len, case.updates[:epoch])) for epoch in range(case.epochs + 1)]
    stops = [moment for moment in every if moment.ends_update and moment.updates not in ends]
    assume(stops)
    stop = data.draw(st.sampled_from(stops))
    older = [moment for moment in every if moment.epoch == stop.epoch and moment.microbatch <= stop.microbatch]
    snapshot = data.draw(st.sampled_from(older))
    forward = stop.microbatch - snapshot.microbatch
    other = case.minibatch_size + data.draw(st.integers(1, 8))
    with pytest.raises((RuntimeError, ValueError), match=REFUSED) if forward else nullcontext():
        rest = rest_of(case, stop, snapshot.iterator, forward, ahead, minibatch_size=other)
        assert rest == case.steps[stop.updates :]


REFUSED = (
    "must be at the same update|are committed|step.. must be called once per microbatch of|"
    "saved within a step can resume only with the same split|must reach optimizer.step"
)


@given(cases(largest_dataset=30), st.data())
@examples(60)
def test_states_of_different_times_never_train_on_wrong_samples(case, data):
    """Whichever is older; inside an update only the loader has a state, and that fits no optimizer's."""
    every = moments(case)
    of_loader, of_optimizer = (data.draw(st.sampled_from(every)) for _ in range(2))
    # A loader that yields nothing is found out by the next set_epoch, which the last epoch does not have.
    at_end = of_loader.microbatch == max(moment.microbatch for moment in every if moment.epoch == of_loader.epoch)
    run = Run(case)
    run.optimizer.load_state_dict(of_optimizer.optimizer)
    assume(not (at_end and run.optimizer.epoch == case.epochs - 1))
    error = error_of(lambda: list(microbatches(run, Resumed(run, of_loader.iterator, 0, 0))))
    if error is None:
        assert together([run.log]) == case.steps[of_optimizer.updates :]
    else:
        assert re.search(REFUSED, error)
        assert run.log == []
        assert not of_loader.ends_update or of_loader.updates != of_optimizer.updates


def test_the_state_of_a_restored_iterator_is_that_it_was_restored_from():
    for moment in moments(CASE):
        batches = iter(CASE.sampler())
        batches.load_state_dict(moment.iterator)
        assert batches.state_dict() == moment.iterator


@pytest.mark.parametrize("change", [{"fixed_shape": False}, {"minibatch_size": 8}])
def test_another_split_within_an_update_raises_with_a_remedy(change):
    inside = moments(CASE)[0].iterator
    run = Run(replace(CASE, **change))
    with pytest.raises(
        ValueError, match=r"same split, but it was .*'minibatch_size': 4, 'fixed_shape': True.*or save when"
    ):
        iter(run.sampler).load_state_dict(inside)


def test_the_iterator_of_another_rank_raises_only_within_an_update():
    first, second = (CASE.sampler(World(rank, 2)) for rank in (0, 1))
    batches = iter(first)
    next(batches)
    with pytest.raises(ValueError, match=r"'rank': 0\} and is .*'rank': 1\}; restore"):
        iter(second).load_state_dict(batches.state_dict())
    next(batches)  # 7 = 1 + 2 + 4: rank 0 has two of them, and rank 1 one
    other = iter(second)
    other.load_state_dict(batches.state_dict())
    assert list(other) == list(second)[1:]


def test_a_loader_of_other_samples_raises():
    _, of_loader, _ = saved_after(3, OPTIONS[0])
    run = Run(replace(CASE, seed=4))
    loader = stateful(run)
    loader.load_state_dict(of_loader)
    with pytest.raises(ValueError, match="but seed was 3 and is 4; restore these arguments"):
        iter(loader)


def test_a_loader_restored_without_its_optimizer_raises():
    _, of_loader, _ = saved_after(3, OPTIONS[0])
    run = Run(CASE)
    loader = stateful(run)
    loader.load_state_dict(of_loader)
    with pytest.raises(RuntimeError, match=r"began at epoch 0, step 3 and .* is at epoch 0, step 0; .*restore"):
        list(microbatches(run, loader))
