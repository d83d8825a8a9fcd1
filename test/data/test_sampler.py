"""The sampler: every sample once, prefetching, loaders, and its arguments."""

from __future__ import annotations

import copy
import itertools
import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.runs import LoggedTraining, Sampling, read_ahead, samplings, together, worlds
from helpers.splitting import rows_of, split_sizes
from variable_batch_size.data import iteration as iteration_module
from variable_batch_size.data.plan import plan as plan_module
from variable_batch_size.data.plan.shuffle import order
from variable_batch_size.world import World

CASE = Sampling(vbs.BatchTrace.from_sizes([7, 3, 12, 1, 5], on_end="cycle"), 40, 4, False, True, seed=3, epochs=4)


# -------------------------------------------------------------- laws 2 and 3: nothing lost, nothing twice, in any world


@given(samplings(), worlds, st.integers(1, 9), st.integers(1, 100))
@examples(80)
def test_each_row_equals_the_slow_twin(case, size, steps_per_deal, indices_per_chunk):
    m, world = case.minibatch_size, World(size // 2, size)
    sampler = case.sampler(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "STEPS_PER_DEAL", steps_per_deal)
        patch.setattr(iteration_module, "INDICES_PER_CHUNK", indices_per_chunk)
        for epoch, updates in enumerate(case.updates):
            samples = order(case.dataset_size, case.seed, epoch)(np.arange(case.dataset_size))
            expected = []
            for update in updates:
                sizes = split_sizes(update.batch_size, m, case.fixed_shape, size)
                mine = range(world.rank, len(sizes), size) or [world.rank % len(sizes)]
                rows = [rows_of(update.start + sum(sizes[:i]), sizes[i], m, case.fixed_shape) for i in mine]
                expected += [samples[positions].tolist() for positions in rows]
            sampler.set_epoch(epoch)
            assert len(sampler) == len(expected)
            assert list(sampler) == expected


def test_without_shuffle_the_order_is_that_of_the_dataset():
    sampler = vbs.CustomSampler(10, 4, minibatch_size=2, shuffle=False)
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        assert list(sampler) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_the_first_microbatch_of_a_billion_samples_needs_little_memory():
    sampler = vbs.CustomSampler(10**9, 10**8 - 1, num_replicas=8, rank=5, minibatch_size=32)
    tracemalloc.start()
    sampler.set_epoch(90)
    batches = iter(sampler)
    for _ in range(1000):
        rows = next(batches)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 2**20
    assert len(rows) == 32


# ----------------------------------------------------------------------------------------------------- law 4: one clock


@pytest.mark.filterwarnings("ignore:set_epoch")
@given(samplings(largest_dataset=60), st.integers(0, 40), st.data())
@examples(60)
def test_prefetched_microbatches_do_not_count(case, ahead, data):
    """Break after any update, keep the iterator alive, and continue in the epoch or in the next one."""
    run, alive, expected = LoggedTraining(case), [], []
    for number, updates in enumerate(case.updates):
        run.set_epoch(number)
        done, leave = 0, False
        while done < len(updates) and not leave:
            stop = data.draw(st.integers(done + 1, len(updates)), label="stop")
            alive.append(read_ahead(run.sampler, ahead))
            for batch in alive[-1]:
                assert run.sampler.state_dict()["step"] == updates[done].step
                done += run.take(batch)
                if done == stop:
                    break
            leave = data.draw(st.booleans(), label="leave")
        expected += [step for step in case.steps if step[0] == number][:done]
    assert together([run.log]) == expected


@given(samplings(largest_dataset=60), st.integers(0, 40))
@examples(60)
def test_the_length_is_that_of_the_pass_under_way_or_of_the_next_one(case, ahead):
    run, lengths = LoggedTraining(case), [*(sum(map(len, cuts(case, epoch))) for epoch in range(case.epochs)), 0]
    for number, length in enumerate(lengths[:-1]):
        run.set_epoch(number)
        assert len(run.sampler) == length
        for passed, batch in enumerate(read_ahead(run.sampler, ahead), 1):
            assert len(run.sampler) == length
            run.take(batch)
            if passed < length or ahead == 0:  # otherwise nobody knows whether the loop has ended
                assert len(run.sampler) == length
        if number + 1 < case.epochs or run.optimizer.done:
            assert len(run.sampler) == lengths[number + 1]


@given(samplings(largest_dataset=60), st.data())
@examples(60)
def test_after_a_restore_the_length_is_that_of_the_rest(case, data):
    run, resumed = LoggedTraining(case), case.sampler()
    every = [update for epoch in case.updates for update in epoch]
    run.train(updates=(stop := data.draw(st.integers(1, len(every)), label="stop")))
    resumed.load_state_dict(run.sampler.state_dict())
    if stop < len(every):
        due = every[stop].epoch
        assert len(resumed) == sum(
            len(own) for own, u in zip(cuts(case, due), case.updates[due], strict=True) if u.step >= every[stop].step
        )


def cuts(case, epoch):
    """The sizes of the microbatches of each update of an epoch."""
    return [split_sizes(u.batch_size, case.minibatch_size, case.fixed_shape) for u in case.updates[epoch]]


WORKERS = [
    {"num_workers": 0},
    {"num_workers": 2, "prefetch_factor": 1, "persistent_workers": True},
    {"num_workers": 2, "prefetch_factor": 8},
    {"num_workers": 4, "prefetch_factor": 3, "persistent_workers": True},
]
with_workers = pytest.mark.parametrize("options", WORKERS, ids=lambda o: "-".join(str(int(v)) for v in o.values()))
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@with_workers
def test_a_loader_with_workers_yields_what_the_sampler_yields(options):
    run = LoggedTraining(CASE)
    loader = DataLoader(range(40), batch_sampler=run.sampler, **options)
    assert together([run.train(loader).log]) == CASE.steps


@pytest.mark.filterwarnings("ignore:set_epoch")
@with_workers
def test_peeking_and_breaking_do_not_move_the_clock(options):
    run = LoggedTraining(CASE)
    loader = DataLoader(range(40), batch_sampler=run.sampler, **options)
    first = next(iter(loader)).tolist()
    for epoch in (0, 1, 3):
        run.set_epoch(epoch)
        for number, batch in enumerate(loader):
            assert number or epoch or batch.tolist() == first
            run.take(batch)
            if epoch == 1 and number == 6:
                break  # inside a step: the three before it had 1, 2 and 3 microbatches
    steps = [[step for step in CASE.steps if step[0] == epoch] for epoch in range(4)]
    assert together([run.log]) == steps[0] + steps[1][:3] + steps[3]


@with_workers
def test_the_length_of_a_loader_is_exact_at_every_position(options):
    run = LoggedTraining(CASE)
    loader = DataLoader(range(40), batch_sampler=run.sampler, **options)
    for updates in CASE.updates[:2]:
        run.set_epoch(updates[0].epoch)
        number, done = [len(sizes) for sizes in cuts(CASE, updates[0].epoch)], 0
        for stop in (1, 4, len(updates)):
            rest = sum(number[done:])
            for batch in loader:
                assert len(loader) == len(run.sampler) == rest
                done += run.take(batch)
                if done == stop:
                    break


# --------------------------------------------------------------------------------------------------------- construction


class Endless(IterableDataset[int]):
    def __iter__(self):
        return iter(int, 1)


def test_accepts_a_dataset_or_its_size_and_every_form_of_trace(tmp_path):
    csv = tmp_path / "trace.csv"
    csv.write_text("step,batchsize\n0,4\n1,4\n2,2\n")
    expected = list(vbs.CustomSampler(10, [4, 4, 2], 1, 0, 2))
    for dataset in (10, np.int64(10), TensorDataset(torch.zeros(10, 3)), [0] * 10):
        for trace in (str(csv), csv, (4, 4, 2), np.array([4, 4, 2]), "0:4 2:2", 4, vbs.BatchTrace.from_csv(csv)):
            assert list(vbs.CustomSampler(dataset, trace, 1, 0, 2)) == expected


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"trace": [5, 11]},
            ValueError,
            "dataset's size of 10 samples, but the trace has a batch size of 11; use a larger",
        ),
        ({"trace": [5, 5], "epochs": 2}, ValueError, "epoch 1, which begins at step 2, 10 samples before the end"),
        ({"trace": [5, 4]}, ValueError, "its 2 steps end in epoch 0, which begins at step 0, 11 samples before"),
        ({"trace": [5, 0]}, ValueError, r"sizes\[1\].*got 0"),
        ({"rank": 0}, ValueError, "passed together, got num_replicas=None and rank=0; pass both, or neither"),
        ({"num_replicas": 2}, ValueError, "passed together, got num_replicas=2 and rank=None; pass both, or neither"),
        ({"num_replicas": 2, "rank": 2}, ValueError, "got rank=2 and num_replicas=2; pass the rank of this process"),
        ({"num_replicas": 2, "rank": -1}, ValueError, "rank must be an integer >= 0, got -1"),
        ({"num_replicas": 0, "rank": 0}, ValueError, "num_replicas must be an integer >= 1, got 0"),
        ({"minibatch_size": 0}, ValueError, "^minibatch_size must be an integer >= 1, got 0; pass a positive integer$"),
        ({"dataset_size": 0}, ValueError, "^dataset_size must be an integer >= 1, got 0"),
        ({"dataset_size": Endless()}, TypeError, r"^dataset_size must be an integer >= 1, got .* \(Endless\)"),
        ({"seed": -1}, ValueError, "seed must be .*, got -1; "),
        ({"seed": 2**64}, ValueError, "seed must be .*, got 18446744073709551616; "),
        ({"on_end": "halt"}, ValueError, "on_end must be .* got 'halt'; "),
        ({"epochs": -1}, ValueError, "epochs must be an integer >= 0, got -1"),
        ({"trace": None}, TypeError, "trace must be a path, .*got None"),
        ({"trace": "nowhere.csv"}, FileNotFoundError, "nowhere.csv"),
    ],
    ids=lambda wrong: "-".join(wrong) if isinstance(wrong, dict) else "",
)
def test_rejects_wrong_arguments(wrong, error, message):
    arguments = {"dataset_size": 10, "trace": [5, 5, 5, 5], "epochs": 2}
    vbs.CustomSampler(**arguments)
    with pytest.raises(error, match=message):
        vbs.CustomSampler(**{**arguments, **wrong})


def test_set_epoch_rejects_an_epoch_that_the_trace_does_not_cover():
    sampler = vbs.CustomSampler(10, [5, 5, 5, 5])
    sampler.set_epoch(1)
    with pytest.raises(ValueError, match="epoch 2, which begins at step 4, 10 samples before"):
        sampler.set_epoch(2)
    assert sampler.epoch == 1
    with pytest.raises(ValueError, match="got -1; count epochs from 0"):
        sampler.set_epoch(-1)


def test_a_copy_is_read_by_itself():
    sampler = vbs.CustomSampler(100, 8, num_replicas=1, rank=0, minibatch_size=4)
    microbatches = iter(sampler)
    next(microbatches)
    for other in (copy.copy(sampler), copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        number = len(sampler)
        assert len(list(itertools.islice(other, 7))) == 7
        assert len(sampler) == number
        assert [*other] == [*vbs.CustomSampler(100, 8, num_replicas=1, rank=0, minibatch_size=4)]
