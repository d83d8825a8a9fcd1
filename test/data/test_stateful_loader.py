"""torchdata's StatefulDataLoader over the sampler: saved anywhere, restored beside the optimizer, it loses nothing."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

import variable_batch_size as vbs
from helpers.loops import CASE
from helpers.properties import examples
from helpers.runs import LoggedTraining, Sampling, read_ahead, samplings, together
from variable_batch_size.testing import run_ranks

OPTIONS = [
    {"num_workers": 0, "snapshot_every_n_steps": 1},
    {"num_workers": 0, "snapshot_every_n_steps": 3},
    {"num_workers": 2, "snapshot_every_n_steps": 1, "prefetch_factor": 1},
    {"num_workers": 2, "snapshot_every_n_steps": 1, "prefetch_factor": 5, "persistent_workers": True},
]
REFUSED = r"the loader was saved at epoch \d+, step \d+(, before .*)?, but the optimizer is at epoch \d+, step \d+;"
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
    run = LoggedTraining(case)
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
    run = LoggedTraining(CASE)
    loader = stateful(run, **options)
    if loader_first:
        loader.load_state_dict(of_loader)
    run.optimizer.load_state_dict(of_optimizer)
    if not loader_first:
        loader.load_state_dict(of_loader)
    list(microbatches(run, loader))
    assert together([begun.log]) == CASE.steps[:stop]
    assert together([run.log]) == CASE.steps[stop:]


@pytest.mark.parametrize("every", [2, 3])
def test_a_snapshot_within_an_update_or_of_an_earlier_one_raises(every):
    """Workers are asked for one only at every so many microbatches."""
    _, of_loader, of_optimizer = saved_after(2, {"num_workers": 2, "snapshot_every_n_steps": every})
    run = LoggedTraining(CASE)
    loader = stateful(run, num_workers=2)
    run.optimizer.load_state_dict(of_optimizer)
    loader.load_state_dict(of_loader)
    with pytest.raises(
        RuntimeError,
        match=r"saved at epoch 0, step 1(, before .*)?, but .* step 2; .* with snapshot_every_n_steps=1",
    ):
        iter(loader)


def test_the_initial_state_may_be_saved_before_the_first_epoch():
    run = LoggedTraining(CASE)
    loader = stateful(run, num_workers=2)
    initial = copy.deepcopy(loader.state_dict())
    list(microbatches(run, loader))
    assert together([run.log]) == CASE.steps
    run = LoggedTraining(CASE)
    loader = stateful(run, num_workers=2)
    loader.load_state_dict(initial)
    list(microbatches(run, loader))
    assert together([run.log]) == CASE.steps


@with_options
@pytest.mark.parametrize("again", [False, True])
def test_a_loader_read_to_the_end_continues_with_the_next_epoch(options, again):
    """Whether or not it is set once more before it."""
    begun = LoggedTraining(CASE)
    loader = stateful(begun, **options)
    begun.set_epoch(0)
    for batch in loader:
        begun.take(batch)
    states = copy.deepcopy((loader.state_dict(), begun.optimizer.state_dict()))
    run = LoggedTraining(CASE)
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


@given(samplings(largest_dataset=40), st.data())
@examples(50)
def test_a_loader_without_workers_resumes_with_another_minibatch_size(case, data):
    stop = data.draw(st.integers(1, len(case.steps)))
    _, of_loader, of_optimizer = saved_after(stop, OPTIONS[data.draw(st.integers(0, 1))], case)
    run = LoggedTraining(case, minibatch_size=data.draw(st.integers(1, 64)))
    loader = stateful(run)
    loader.load_state_dict(of_loader)
    run.optimizer.load_state_dict(of_optimizer)
    list(microbatches(run, loader))
    assert together([run.log]) == case.steps[stop:]


# ---------------------------------------------------------------------------- what torchdata does, without processes


@dataclass(frozen=True)
class Moment:
    """After how many updates, with the state of the sampler's iterator then."""

    updates: int
    ends_update: bool
    iterator: dict[str, int]
    optimizer: dict[str, Any]  # of the last whole update


def moments(case, backend=None):
    """All of a training: after each microbatch."""
    run, result = LoggedTraining(case, backend), []
    updates, optimizer = 0, copy.deepcopy(run.optimizer.state_dict())
    for epoch in range(case.epochs):
        run.set_epoch(epoch)
        batches = iter(run.sampler)
        for batch in batches:
            updated = run.take(batch)
            if updated:
                updates, optimizer = updates + 1, copy.deepcopy(run.optimizer.state_dict())
            result.append(Moment(updates, updated, batches.state_dict(), optimizer))
    return result


def rest_of(case, optimizer, iterator, ahead, *, backend=None, minibatch_size=None):
    """Train on from the state of an optimizer, at first with an iterator that resumes from a snapshot."""
    run = LoggedTraining(case, backend, minibatch_size)
    run.optimizer.load_state_dict(optimizer)
    for epoch in range(run.optimizer.epoch, case.epochs):
        run.set_epoch(epoch)
        for batch in read_ahead(run.sampler, ahead, iterator):
            run.take(batch)
        iterator = None
    return run.log


def test_a_loader_that_resumes_where_the_training_ends_reads_nothing():
    case = Sampling(vbs.BatchTrace.from_sizes([2] * 20), 2, 1, False, False, seed=0, epochs=3, max_updates=1)
    first, last = moments(case)
    assert rest_of(case, last.optimizer, last.iterator, 0) == []
    assert not first.ends_update


@given(samplings(largest_dataset=30), st.integers(0, 12), st.integers(1, 3), st.data())
@examples(60)
def test_a_snapshot_of_an_update_resumes_there_in_any_world(case, ahead, size, data):
    """Its position is that of the next update, whatever the microbatches; one of another moment raises."""
    every = moments(case)
    stop = data.draw(st.sampled_from([moment for moment in every if moment.ends_update]))
    other = data.draw(st.integers(1, 64))

    def train(backend):
        return rest_of(case, stop.optimizer, stop.iterator, ahead, backend=backend, minibatch_size=other)

    assert together(run_ranks(train, size)) == case.steps[stop.updates :]


@given(samplings(largest_dataset=30), st.data())
@examples(60)
def test_states_of_different_times_never_train_on_wrong_samples(case, data):
    """Whichever is older; inside an update only the loader has a state, and that fits no optimizer's."""
    every = moments(case)
    of_loader, of_optimizer = (data.draw(st.sampled_from(every)) for _ in range(2))
    fits = of_loader.ends_update and of_loader.updates == of_optimizer.updates
    assume(of_optimizer.updates < len(case.steps))
    with nullcontext() if fits else pytest.raises(RuntimeError, match=REFUSED):
        rest = rest_of(case, of_optimizer.optimizer, of_loader.iterator, 0)
        assert together([rest]) == case.steps[of_optimizer.updates :]


def test_a_loader_of_other_samples_raises():
    _, of_loader, _ = saved_after(3, OPTIONS[0])
    run = LoggedTraining(replace(CASE, seed=4))
    loader = stateful(run)
    loader.load_state_dict(of_loader)
    with pytest.raises(ValueError, match="but seed was 3 and is 4; restore these arguments"):
        iter(loader)


def test_a_loader_restored_without_its_optimizer_raises():
    _, of_loader, _ = saved_after(3, OPTIONS[0])
    run = LoggedTraining(CASE)
    loader = stateful(run)
    loader.load_state_dict(of_loader)
    with pytest.raises(RuntimeError, match=r"only the sampler was restored, to epoch 0, step 3; restore both"):
        list(microbatches(run, loader))
