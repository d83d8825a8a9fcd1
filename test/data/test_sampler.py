"""The sampler: laws 2 to 5 over random traces, worlds and loaders; its states; what it refuses."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import variable_batch_size as vbs
from helpers.reference import examples
from helpers.strategies import Case, Run, cases, cut, minibatch_sizes, read_ahead, rows_of, together, worlds
from variable_batch_size.backend import Backend
from variable_batch_size.data import plan as plan_module
from variable_batch_size.data import sampler as sampler_module
from variable_batch_size.data.shuffle import order
from variable_batch_size.testing import run_ranks
from variable_batch_size.world import World

CASE = Case(vbs.BatchTrace.from_sizes([7, 3, 12, 1, 5], on_end="cycle"), 40, 4, False, True, seed=3, epochs=4)


# --------------------------------------------------------------------------------------------------- laws 2 and 3


@given(cases(), worlds, st.integers(1, 9), st.integers(1, 100))
@examples(80)
def test_each_row_is_that_of_the_slow_twin(case: Case, size: int, steps_at_once: int, indices_at_once: int) -> None:
    m, world = case.minibatch_size, World(size // 2, size)
    sampler = case.sampler(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "STEPS_AT_ONCE", steps_at_once)
        patch.setattr(sampler_module, "INDICES_AT_ONCE", indices_at_once)
        for epoch, updates in enumerate(case.updates):
            samples = order(case.dataset_size, case.seed, epoch)(np.arange(case.dataset_size))
            expected = []
            for update in updates:
                pieces = cut(update.batch_size, m, case.fixed_shape)
                mine = range(world.rank, len(pieces), size) or [world.rank % len(pieces)]
                rows = [rows_of(update.start + sum(pieces[:i]), pieces[i], m, case.fixed_shape) for i in mine]
                expected += [samples[positions].tolist() for positions in rows]
            sampler.set_epoch(epoch)
            assert len(sampler) == len(expected)
            assert list(sampler) == expected


@given(cases(), worlds)
@examples(60)
def test_every_sample_counts_once_an_epoch_over_all_ranks(case: Case, size: int) -> None:
    samplers = [case.sampler(World(rank, size)) for rank in range(size)]
    for number, updates in enumerate(case.updates):
        weights: Counter[int] = Counter()
        for sampler in samplers:
            sampler.set_epoch(number)
            plan, epoch = sampler.plan, sampler.plan.epoch(number)
            steps = [plan.step(epoch, step) for step in range(epoch.first_step, epoch.end_step)]
            due = [s.microbatch(turn, sampler.world) for s in steps for turn in range(s.rounds(sampler.world))]
            for microbatch, rows in zip(due, sampler, strict=True):
                for index in rows:
                    weights[index] += Fraction(microbatch.samples, len(rows))
        assert set(weights.values()) <= {0, 1}
        used = {index for index, weight in weights.items() if weight}
        assert used <= set(range(case.dataset_size))
        assert len(used) == sum(update.batch_size for update in updates)
        assert case.drop_last or len(used) == case.dataset_size


@given(cases(largest_dataset=60), st.integers(1, 5), minibatch_sizes)
@examples(30)
def test_the_samples_of_a_step_and_their_order_know_no_world(case: Case, size: int, minibatch_size: int) -> None:
    logs = run_ranks(lambda backend: Run(case, backend, minibatch_size).go_on().log, size)
    assert together(logs) == case.steps


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    sampler = vbs.CustomSampler(10, 4, minibatch_size=2, shuffle=False)
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        assert list(sampler) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_the_order_depends_on_the_epoch_and_on_the_seed() -> None:
    def first(seed: int, epoch: int) -> tuple[int, ...]:
        sampler = vbs.CustomSampler(1000, 1000, minibatch_size=1000, seed=seed)
        sampler.set_epoch(epoch)
        return tuple(*sampler)

    assert len({first(seed, epoch) for seed in (0, 1, 2**64 - 1) for epoch in (0, 1, 7)}) == 9
    assert first(5, 2) == first(5, 2)


def test_the_first_microbatch_of_a_billion_samples_takes_little_memory() -> None:
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


# --------------------------------------------------------------------------------------------------------- law 4


@given(cases(largest_dataset=60), st.integers(0, 40), st.data())
@examples(60)
def test_what_was_prefetched_has_not_happened(case: Case, ahead: int, data: st.DataObject) -> None:
    """Break off behind any update, leave the iterator alive, and go on in the epoch or in the next one."""
    run, alive, expected = Run(case), [], []
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
            rest = [cut(u.batch_size, case.minibatch_size, case.fixed_shape) for u in updates[done:]]
            assert len(run.sampler) == sum(map(len, rest))
            leave = data.draw(st.booleans(), label="leave")
        expected += [step for step in case.steps if step[0] == number][:done]
    assert together([run.log]) == expected


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
def test_a_loader_with_workers_deals_what_the_sampler_deals(options: dict[str, Any]) -> None:
    run = Run(CASE)
    loader = DataLoader(range(40), batch_sampler=run.sampler, **options)
    assert together([run.go_on(loader).log]) == CASE.steps


@with_workers
def test_a_look_at_the_data_and_breaking_off_move_nothing_in_a_loader(options: dict[str, Any]) -> None:
    run = Run(CASE)
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


def test_a_generator_that_is_left_alive_moves_nothing() -> None:
    run = Run(CASE)
    loader = DataLoader(range(40), batch_sampler=run.sampler, num_workers=2)
    alive = []
    for _ in range(3):
        alive.append(iter(loader))
        while not run.take(next(alive[-1])):
            pass
    assert together([run.log]) == CASE.steps[:3]


@with_workers
def test_the_length_of_a_loader_is_exact_wherever_it_stands(options: dict[str, Any]) -> None:
    run = Run(CASE)
    loader = DataLoader(range(40), batch_sampler=run.sampler, **options)
    for updates in CASE.updates[:2]:
        run.set_epoch(updates[0].epoch)
        cuts, done = [len(cut(update.batch_size, 4, True)) for update in updates], 0
        for stop in (1, 4, len(updates)):
            assert len(loader) == len(run.sampler) == sum(cuts[done:])
            for batch in loader:
                done += run.take(batch)
                assert len(loader) == len(run.sampler) == sum(cuts[done:])
                if done == stop:
                    break


# --------------------------------------------------------------------------------------------------------- law 5


@given(cases(largest_dataset=60), st.data())
@examples(50)
def test_a_training_stops_at_any_update_and_goes_on_anywhere(case: Case, data: st.DataObject) -> None:
    """With other objects, another world and another microbatch, in whatever order the states are loaded."""
    stop = data.draw(st.integers(0, len(case.steps)), label="stop")
    size, then = (data.draw(st.integers(1, 3), label="world") for _ in range(2))
    minibatch_size, fixed_shape = data.draw(minibatch_sizes), data.draw(st.booleans())
    loads = data.draw(st.sampled_from([["optimizer"], ["optimizer", "sampler"], ["sampler", "optimizer"]]))
    other = replace(case, fixed_shape=fixed_shape)

    def begin(backend: Backend) -> tuple[Run, dict[str, Any]]:
        run = Run(case, backend).go_on(updates=stop)
        sampler = json.loads(json.dumps(run.sampler.state_dict()))
        return run, {"optimizer": copy.deepcopy(run.optimizer.state_dict()), "sampler": sampler}

    def go_on(backend: Backend) -> Run:
        run = Run(other, backend, minibatch_size)
        for name in loads:
            getattr(run, name).load_state_dict(states[0][name])
        assert run.optimizer.updates == stop
        return run.go_on()

    begun, states = zip(*run_ranks(begin, size), strict=True)
    assert all(state == states[0] for state in states)
    first = together(run.log for run in begun)
    assert first == case.steps[:stop]
    assert first + together(run.log for run in run_ranks(go_on, then)) == case.steps


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_state_from_an_epochs_end_goes_on_with_an_empty_rest(epoch: int) -> None:
    stop = sum(len(updates) for updates in CASE.updates[: epoch + 1])
    state = Run(CASE).go_on(updates=stop).optimizer.state_dict()
    run = Run(CASE)
    run.optimizer.load_state_dict(state)
    for number in (epoch, epoch + 1):
        run.set_epoch(number)
        assert len(run.sampler) == (0 if number == epoch else [17, 16, 16][number])
        for batch in run.sampler:
            run.take(batch)
    assert together([run.log]) == [s for s in CASE.steps if s[0] == epoch + 1]


# ----------------------------------------------------------------------------------------------- set_epoch, states


def batches(**options: Any) -> list[list[list[int]]]:
    """Of each of the four epochs."""
    result = []
    for epoch in range(4):
        sampler = CASE.sampler(**options)
        sampler.set_epoch(epoch)
        result.append(list(sampler))
    return result


def test_set_epoch_goes_anywhere_whatever_was_read_before() -> None:
    sampler, expected = CASE.sampler(), batches()
    for epoch in (3, 0, 2, 2, 1):
        sampler.set_epoch(epoch)
        assert sampler.epoch == epoch
        assert list(sampler) == expected[epoch]
        assert list(sampler) == expected[epoch]  # again, as any PyTorch sampler: nothing was committed
    sampler.set_epoch(np.int64(3))
    assert type(sampler.epoch) is int
    assert list(sampler) == expected[3]


def test_set_epoch_begins_the_epoch_again_and_counts_left_steps_as_passed() -> None:
    run = Run(CASE).go_on(updates=3)
    run.set_epoch(0)
    assert run.sampler.state_dict()["step"] == 0
    run.set_epoch(2)
    assert run.optimizer.updates == run.sampler.state_dict()["step"] == CASE.updates[2][0].step
    assert run.optimizer.samples == 80


def test_set_epoch_stays_where_a_state_of_that_epoch_stands_and_only_there() -> None:
    state = Run(CASE).go_on(updates=len(CASE.updates[0]) + 2).sampler.state_dict()
    sampler = CASE.sampler()
    sampler.load_state_dict(state)
    sampler.set_epoch(1)
    assert list(sampler) == batches()[1][3:]  # 1 and 2 microbatches were committed
    sampler.set_epoch(2)
    sampler.set_epoch(1)
    assert list(sampler) == batches()[1]


def test_the_state_is_plain_and_that_of_the_committed_position() -> None:
    run = Run(CASE).go_on(updates=2)
    state = run.sampler.state_dict()
    assert {type(value) for value in state.values()} == {int, bool, str}
    assert json.loads(json.dumps(state)) == state
    assert (state["epoch"], state["step"]) == (0, 2)
    ahead = iter(run.sampler)
    for batch in [next(ahead) for _ in range(4)][:1]:
        run.take(batch)  # the first of several of a step
    assert run.sampler.state_dict() == state
    assert not {"rank", "world", "num_replicas", "minibatch_size"} & set(state)


def test_the_sampler_goes_to_a_state_and_an_optimizer_made_after_it_follows() -> None:
    state = Run(CASE).go_on(updates=2).sampler.state_dict()
    sampler = CASE.sampler()
    sampler.load_state_dict(state)
    assert list(sampler) == batches()[0][5:]  # 3 and 2 microbatches were committed
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)]), sampler)
    assert (optimizer.epoch, optimizer.updates) == (0, 2)


def test_the_optimizers_clock_wins_over_a_samplers_state() -> None:
    early, late = Run(CASE).go_on(updates=2), Run(CASE).go_on(updates=9)
    run = Run(CASE)
    run.optimizer.load_state_dict(late.optimizer.state_dict())
    run.sampler.load_state_dict(early.sampler.state_dict())
    assert run.sampler.state_dict() == late.sampler.state_dict()
    assert together([run.go_on().log]) == CASE.steps[9:]


DIFFERENT = {
    "dataset_size": replace(CASE, dataset_size=41),
    "seed": replace(CASE, seed=4),
    "drop_last": replace(CASE, drop_last=True),
    "trace": replace(CASE, trace=vbs.BatchTrace.from_sizes([7, 3, 12, 1, 6], on_end="cycle")),
    "on_end": replace(CASE, trace=vbs.BatchTrace.from_sizes([7, 3, 12, 1, 5] * 9, on_end="hold")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_state_of_other_samples_is_refused_unless_not_strict(name: str) -> None:
    state, sampler = Run(DIFFERENT[name]).go_on(updates=2).sampler.state_dict(), CASE.sampler()
    found = "trace" if name == "on_end" else name
    with pytest.raises(ValueError, match=rf"^a state .* but {found} was \S+ and is \S+; restore .* strict=False"):
        sampler.load_state_dict(state)
    assert sampler.state_dict()["step"] == 0
    sampler.load_state_dict(state, strict=False)
    assert sampler.state_dict()["step"] == 2


def test_all_differences_of_a_state_are_named() -> None:
    state = {**CASE.sampler().state_dict(), "seed": 9}
    with pytest.raises(
        ValueError, match="but dataset_size was 40 and is 39, seed was 9 and is 3, shuffle was True and is"
    ):
        replace(CASE, dataset_size=39).sampler(shuffle=False).load_state_dict(state)


def test_a_state_of_another_shuffling_trace_form_world_and_microbatch_is_taken() -> None:
    same = vbs.BatchTrace.from_sizes(np.array([7, 3, 12, 1, 5]), on_end="cycle")
    state = Run(CASE).go_on(updates=2).sampler.state_dict()
    sampler = replace(CASE, trace=same, fixed_shape=False).sampler(World(2, 5), 16)
    sampler.load_state_dict(state)
    assert sampler.state_dict() == state


def test_a_position_that_the_plan_does_not_have_is_refused() -> None:
    state = {**CASE.sampler().state_dict(), "epoch": 1, "step": 40}
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"epoch 1 has the steps 8 to 15 and the state stands at step 40; restore"):
            CASE.sampler().load_state_dict(state, strict)


# ------------------------------------------------------------------------------------------------------ construction


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


def test_a_dataset_or_its_size_may_be_given_and_every_form_of_trace(tmp_path: Any) -> None:
    csv = tmp_path / "trace.csv"
    csv.write_text("step,batchsize\n0,4\n1,4\n2,2\n")
    expected = list(vbs.CustomSampler(10, [4, 4, 2], 1, 0, 2))
    for dataset in (10, np.int64(10), TensorDataset(torch.zeros(10, 3)), [0] * 10):
        for trace in (str(csv), csv, (4, 4, 2), np.array([4, 4, 2]), "0:4 2:2", 4, vbs.BatchTrace.from_csv(csv)):
            assert list(vbs.CustomSampler(dataset, trace, 1, 0, 2)) == expected


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"trace": [5, 11]}, ValueError, "dataset, which has 10 samples, but the trace has one of 11; use a larger"),
        ({"trace": [5, 5], "epochs": 2}, ValueError, "epoch 1, which begins at step 2, needs 10 samples more than"),
        ({"trace": [5, 4]}, ValueError, "epoch 0, which begins at step 0, needs 1 samples more than the trace's 2"),
        ({"trace": [5, 0]}, ValueError, r"sizes\[1\].*got 0"),
        ({"rank": 0}, ValueError, "passed together, got num_replicas=None and rank=0; pass both, or neither"),
        ({"num_replicas": 2}, ValueError, "passed together, got num_replicas=2 and rank=None; pass both, or neither"),
        ({"num_replicas": 2, "rank": 2}, ValueError, "got rank=2 and num_replicas=2; pass this process's own rank"),
        ({"num_replicas": 2, "rank": -1}, ValueError, "got rank=-1 and num_replicas=2"),
        ({"num_replicas": 0, "rank": 0}, ValueError, "needs num_replicas >= 1"),
        ({"num_replicas": 2, "rank": "1"}, TypeError, r"^rank must be an integer, got '1' \(str\); pass an int$"),
        ({"num_replicas": 2.0, "rank": 1}, TypeError, r"^num_replicas must be an integer, got 2.0 \(float\)"),
        ({"minibatch_size": 0}, ValueError, "^minibatch_size must be an integer >= 1, got 0; pass a larger one$"),
        ({"minibatch_size": 2.5}, TypeError, r"^minibatch_size must be an integer, got 2.5 \(float\); pass an int"),
        ({"dataset_size": 0}, ValueError, "^dataset_size must be an integer >= 1, got 0"),
        ({"dataset_size": 10.0}, TypeError, r"^dataset_size must be an integer, got 10.0 \(float\)"),
        ({"dataset_size": Endless()}, TypeError, r"^dataset_size must be an integer, got .* \(Endless\)"),
        ({"seed": -1}, ValueError, "seed must be .*, got -1; "),
        ({"seed": 2**64}, ValueError, "seed must be .*, got 18446744073709551616; "),
        ({"seed": 0.5}, TypeError, "^seed must be an integer, got 0.5"),
        ({"on_end": "stop"}, ValueError, "on_end must be .* got 'stop'; "),
        ({"epochs": 2.0}, TypeError, "^epochs must be an integer, got 2.0"),
        ({"epochs": -1}, ValueError, "epoch is a whole number >= 0, got -2"),
        ({"trace": None}, TypeError, "trace must be a path, .*got None"),
        ({"trace": "nowhere.csv"}, FileNotFoundError, "nowhere.csv"),
    ],
    ids=lambda wrong: "-".join(wrong) if isinstance(wrong, dict) else "",
)
def test_arguments_that_do_not_fit_are_refused(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"dataset_size": 10, "trace": [5, 5, 5, 5], "epochs": 2}
    vbs.CustomSampler(**arguments)
    with pytest.raises(error, match=message):
        vbs.CustomSampler(**{**arguments, **wrong})


def test_an_epoch_that_the_trace_does_not_reach_is_refused_by_set_epoch() -> None:
    sampler = vbs.CustomSampler(10, [5, 5, 5, 5])
    sampler.set_epoch(1)
    with pytest.raises(ValueError, match="epoch 2, which begins at step 4, needs 10 samples more"):
        sampler.set_epoch(2)
    assert sampler.epoch == 1
    with pytest.raises(ValueError, match="got -1; count epochs from 0"):
        sampler.set_epoch(-1)
