"""A controller in a user's loop: loaders that read ahead, restored states, and mistakes."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import variable_batch_size as vbs
from helpers.adaptive_training import DATA, SAMPLES, TARGETS, Setting, Wild, part, read_ahead, trained
from helpers.controllers import smoothed
from helpers.loops import InThread
from variable_batch_size.adaptive import ConstantBatch, ControlInput, NoiseScale, PerDevice
from variable_batch_size.adaptive.decisions import Decision
from variable_batch_size.data import decided
from variable_batch_size.rules.adascale import measured_gain
from variable_batch_size.testing import run_ranks
from variable_batch_size.world import World

# What a loader reads. ------------------------------------------------------------------------------------------------


def small(every=10, delay=8, **options):
    trace = vbs.AdaptiveTrace(Wild(3, needs_noise=False), every=every, delay=delay, **options)
    return Setting(trace, minibatch_size=4, fixed_shape=False, rule="linear")


def build(setting, **options):
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 1, bias=False).double()
    arguments = {"seed": 5, "fixed_shape": setting.fixed_shape} | options
    sampler = vbs.CustomSampler(SAMPLES, setting.trace, 1, 0, setting.minibatch_size, **arguments)
    inner = torch.optim.SGD(model.parameters(), lr=0.003)
    return model, sampler, vbs.CustomOptimizer(inner, sampler, ref_batchsize=8, rule=setting.rule, **{"noise": None})


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Indices as a dataset, for loaders with workers."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor(index)


def train(model, optimizer, batch):
    rows = torch.as_tensor(batch)
    ((model(DATA[rows])[:, 0] - TARGETS[rows]) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def runs_of(sampler):
    return [(int(first), int(size)) for first, size in zip(*sampler.trace.runs, strict=True)]


EXPECTED = trained(small(), [(1, 60)])[2]


@pytest.mark.parametrize(
    "workers", [0, 2, *(pytest.param(n, marks=pytest.mark.slow("starts workers")) for n in (1, 3, 4))]
)
def test_workers_change_nothing(workers):
    model, sampler, optimizer = build(small(delay=16))
    expected = trained(small(delay=16), [(1, 40)])[2]
    data = torch.utils.data.DataLoader(Samples(), batch_sampler=sampler, num_workers=workers)
    for _ in vbs.remaining_epochs(sampler, optimizer, until=40, by="updates"):
        for batch in data:
            if optimizer.updates < 40:
                train(model, optimizer, batch)
        if optimizer.updates >= 40:
            break
    assert [run for run in runs_of(sampler) if run[0] < 40] == expected


def test_a_loader_that_reads_in_a_thread_waits_for_the_decisions():
    model, sampler, optimizer = build(small(delay=4), max_updates=60)
    for _ in vbs.remaining_epochs(sampler, optimizer):
        for batch in InThread(sampler, 1000):
            train(model, optimizer, batch)
    assert optimizer.updates == 60
    assert runs_of(sampler) == trained(small(delay=4), [(1, 60)])[2]


def read_all(setting, ahead):
    """Train with a loader that reads ahead; return the number of updates."""
    model, sampler, optimizer = build(setting, max_updates=60)
    for _ in vbs.remaining_epochs(sampler, optimizer):
        for batch in read_ahead(sampler, ahead):
            train(model, optimizer, batch)
    return optimizer.updates


@pytest.mark.parametrize("ahead", [6, 12, 30])
@pytest.mark.parametrize("every", [1, 3, 20])
def test_a_loader_that_reads_too_far_is_told_which_delay_to_pass(every, ahead):
    """Step by step, because the first reads do not tell yet how far the loader goes; and by a formula, at once."""
    delays, done = [4], False
    while not done:
        try:
            done = read_all(small(every=every, delay=delays[-1], bounds=(1, 9)), ahead) == 60
        except RuntimeError as error:
            found = re.fullmatch(
                r"the loader reads update \d+, \d+ reads ahead of step\(\), but sizes are known up to \d+; pass "
                r"delay=num_workers \* prefetch_factor \+ 4 \(at least (\d+)\) to AdaptiveTrace",
                str(error),
            )
            assert found is not None
            delays.append(int(found[1]))
    assert delays == sorted(set(delays))
    assert delays[-1] <= ahead + 4
    assert read_all(small(every=every, delay=ahead + 4, bounds=(1, 9)), ahead) == 60


@pytest.mark.parametrize("created_in_the_thread", [False, True])
def test_a_list_of_the_sampler_in_another_thread_does_not_hang(created_in_the_thread):
    errors = []
    created = None if created_in_the_thread else build(small(every=3, delay=4))[1]

    def read():
        try:
            list(created or build(small(every=3, delay=4))[1])
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(20)
    assert (thread.is_alive(), len(errors)) == (False, 1)


def test_updates_reads_by_update():
    model, sampler, optimizer = build(small(), max_updates=60)
    loader = torch.utils.data.DataLoader(Samples(), batch_sampler=sampler)
    lengths = []
    while not optimizer.done:
        updates = vbs.updates(loader, optimizer)
        lengths.append(len(updates))
        for update in updates:
            for batch in update:
                train(model, optimizer, batch)
    assert runs_of(sampler) == EXPECTED
    plan, numbers = sampler.plan, range(len(lengths))
    assert sum(lengths) != 60  # an estimate, as if the last batch size stayed
    assert plan.epoch(numbers[-1]).end_step == 60


# Beginning, stopping, failing. ---------------------------------------------------------------------------------------


def test_the_record_is_a_trace(tmp_path):
    model, sampler, optimizer = build(small())
    with pytest.raises(AttributeError, match=r"^the trace so far needs at least one update, but there was"):
        _ = sampler.trace
    for batch in sampler:
        train(model, optimizer, batch)
    sampler.trace.to_csv(tmp_path / "trace.csv")
    again = vbs.BatchTrace.from_csv(tmp_path / "trace.csv")
    assert again == sampler.trace
    assert len(again) == optimizer.updates


def test_a_skipped_epoch_drops_its_questions():
    model, sampler, optimizer = build(small(every=5, delay=6))
    for batch in sampler:
        train(model, optimizer, batch)
        if optimizer.updates == 6 and not optimizer.inside_step:  # the question of update 5 is not answered
            break
    with pytest.warns(UserWarning, match=r"^set_epoch\(2\) skips"):
        sampler.set_epoch(2)
    first = optimizer.updates
    for batch in sampler:
        train(model, optimizer, batch)
    assert optimizer.updates > first + 5
    sizes = [size for begin, size in runs_of(sampler) if begin <= first]
    assert len(sizes) == 1  # the first answer, which the answer to update 0 is


def test_a_training_with_a_fixed_trace_goes_on_with_a_controller():
    fixed = Setting(8, minibatch_size=4, fixed_shape=False, rule="linear")
    state, weights, _ = trained(fixed, [(1, 33)])
    adaptive = small(start=8)
    results = run_ranks(lambda backend: part(adaptive, backend.world, backend, state, 60, weights), 2)
    (_, _, runs), (_, _, others) = results
    assert runs == others
    assert runs[0] == (0, 8)
    assert runs[1][0] == 48  # asked at 40
    for start, match in (
        (
            None,
            r"^a run with a fixed trace can continue with a controller only if its batch size is start, got start=None",
        ),
        (9, r"^a state can be restored only with the samples .* first 33 batch sizes of the trace are not the same"),
    ):
        with pytest.raises(ValueError, match=match):
            part(small(start=start), World(), None, state, 60, weights)


@pytest.mark.filterwarnings("ignore:set_epoch")
def test_a_look_at_later_epochs_changes_nothing():
    model, sampler, optimizer = build(small(every=4, delay=6), max_updates=60)
    for epoch in (*range(5), 0):
        sampler.set_epoch(epoch)
    while not optimizer.done:
        here = optimizer.epoch
        sampler.set_epoch(here + 3)
        sampler.set_epoch(here)
        for number, batch in enumerate(sampler):
            train(model, optimizer, batch)
            if number > 6 and not optimizer.inside_step:
                break
    assert runs_of(sampler) == trained(small(every=4, delay=6), [(1, 60)])[2]


@pytest.mark.parametrize("said", ["sampler", "optimizer", "sampler optimizer", "optimizer sampler", "sampler sampler"])
@pytest.mark.filterwarnings("ignore:set_epoch")
def test_an_epoch_may_be_left_early(said):
    model, sampler, optimizer = build(small(every=1, delay=8))
    parts = {"sampler": sampler, "optimizer": optimizer}
    for epoch in range(3):
        for name in said.split():
            parts[name].set_epoch(epoch)
        for batch in sampler:
            train(model, optimizer, batch)
            if epoch == 0 and optimizer.updates == 3:
                break
    assert optimizer.epoch == 3
    epochs = [sampler.plan.epoch(number) for number in (sampler.plan.first_epoch, 3)]
    assert optimizer.updates == epochs[-1].first_step


def test_a_chosen_epoch_is_cut_as_an_optimizer_that_is_created_later_needs():
    sampler = vbs.CustomSampler(SAMPLES, small(every=1, delay=8).trace, 2, 0, 4)
    sampler.set_epoch(1)
    sampler.attach(spread=False, padded=True)
    for epoch in (1, 2, 1):
        sampler.set_epoch(epoch)
        assert sampler.due == (epoch, sampler.plan.epoch(epoch).first_step)
        assert sampler.dealing == (1, True, None)
        next(iter(sampler))  # what is skipped is known


@pytest.mark.filterwarnings("ignore:set_epoch")
def test_a_state_that_is_saved_after_a_look_at_a_later_epoch_and_back_is_that_before():
    model, sampler, optimizer = build(small(every=1, delay=8))
    for batch in sampler:
        train(model, optimizer, batch)
        if optimizer.updates == 4:
            break
    expected = optimizer.state_dict()["vbs"]["sampler"]
    sampler.set_epoch(2)
    assert optimizer.updates > 4
    sampler.set_epoch(0)
    assert optimizer.state_dict()["vbs"]["sampler"] == expected
    _, _, again = build(small(every=1, delay=8))
    again.load_state_dict(optimizer.state_dict())
    assert again.updates == 4


def test_another_optimizer_goes_on_asking():
    trace = vbs.AdaptiveTrace(lambda input: 4 + input.updates % 9, every=4, delay=6)
    setting = replace(small(), trace=trace)
    model, sampler, first = build(setting, max_updates=60)
    optimizer = first
    for _ in vbs.remaining_epochs(sampler, first):
        for batch in sampler:
            train(model, optimizer, batch)
            if optimizer.updates == 9:
                break
        break
    del first, optimizer  # by which it leaves
    second = vbs.CustomOptimizer(torch.optim.SGD(model.parameters(), lr=0.003), sampler, 8, rule="linear")
    for _ in vbs.remaining_epochs(sampler, second):
        for batch in sampler:
            train(model, second, batch)
    assert second.updates == 60
    assert runs_of(sampler) == trained(setting, [(1, 60)])[2]


@pytest.mark.parametrize("before", [{"every": 20, "delay": 9}, {"every": 1, "delay": 30}, {"every": None, "delay": 5}])
@pytest.mark.parametrize("after", [{"every": 3, "delay": 5}, {"every": 7, "delay": 20}, {"every": None, "delay": 5}])
@pytest.mark.parametrize("stop", [23, pytest.param(40, marks=pytest.mark.slow("stops elsewhere"))])
@pytest.mark.filterwarnings("ignore:Resumed with another AdaptiveTrace")
def test_a_resumed_run_may_ask_at_other_times(before, after, stop):
    state, weights, first = trained(small(**before), [(1, stop)])
    _, _, runs = part(small(**after), World(), None, state, 120, weights)
    assert runs[: len(first)] == first
    if after["every"] is None:
        return
    controller = Wild(3, needs_noise=False)
    model, sampler, optimizer = build(small(**after))
    optimizer.load_state_dict(state)
    asked = [Decision(0, 0)]
    for _ in vbs.remaining_epochs(sampler, optimizer, until=100):
        for batch in sampler:
            train(model, optimizer, batch)
            decided = sampler.batches.decided
            assert decided is not None
            decision = decided.decisions[-1]
            if decision.begins != asked[-1].begins and decision.input.updates > stop:
                asked.append(decision)
        if optimizer.updates > 120:
            break
    for decision, later in itertools.pairwise(asked[1:]):
        assert decision.begins == decision.input.updates + after["delay"]
        sizes = sampler.plan.trace.batch_sizes(range(decision.begins, later.begins)).tolist()
        assert set(sizes) == {controller(decision.input)}


def test_a_resumed_run_may_have_another_controller_or_other_bounds():
    constant = small(every=None, start=None)
    state, weights, runs = trained(
        Setting(vbs.AdaptiveTrace(ConstantBatch(20), every=None), 4, False, "linear"), [(1, 9)]
    )
    assert runs == [(0, 20)]
    for trace, size in (
        (vbs.AdaptiveTrace(ConstantBatch(20), bounds=(1, 12), every=None), 12),
        (vbs.AdaptiveTrace(ConstantBatch(7), every=None), 7),
        (vbs.AdaptiveTrace(ConstantBatch(7), start=20, every=None), 7),
    ):
        with pytest.warns(UserWarning, match=r"^Resumed with another AdaptiveTrace: batch sizes were chosen by C"):
            _, _, runs = part(replace(constant, trace=trace), World(), None, state, 30, weights)
        assert runs == [(0, 20), (9, size)]


def test_ranks_that_ask_at_other_times_are_refused():
    def rank(backend):
        setting = small(every=5 + backend.world.rank, start=8)
        part(setting, backend.world, backend, None, 40, torch.zeros(1, 3, dtype=torch.float64))

    with pytest.raises(RuntimeError, match=r"^all ranks must train with the same controller"):
        run_ranks(rank, 2)


@dataclass(frozen=True)
class Seen:
    """A controller that keeps what it gets, and chooses a batch that measures nothing."""

    inputs: list[ControlInput]
    size: int
    needs_noise = True

    def __call__(self, input):
        self.inputs.append(input)
        return self.size


def test_noise_that_nothing_measures_any_more_is_told():
    setting = Setting(vbs.AdaptiveTrace(Seen([], 4), start=16, every=4, delay=5), 4, False, "linear")
    with pytest.warns(UserWarning, match=r"^The controller got the same gradient noise 4 times, because no update"):
        trained(setting, [(1, 60)])


def test_the_gain_is_that_of_the_present_batch_size():
    seen = Seen([], 24)
    trained(Setting(vbs.AdaptiveTrace(seen, start=16, every=4, delay=5), 4, False, "linear"), [(1, 30)])
    assert len(seen.inputs) == 8
    for input in seen.inputs[1:]:
        assert input.noise is not None
        assert input.batch_size in (16, 24)
        expected = measured_gain(input.noise.sigma2, input.noise.mu2, input.batch_size, 8)
        assert input.noise.gain == pytest.approx(expected)


@dataclass(frozen=True)
class Failing:
    def __call__(self, input):
        if input.updates == 10:
            raise ZeroDivisionError("no machines")
        return 8


def test_all_ranks_raise_when_a_controller_fails():
    setting = Setting(vbs.AdaptiveTrace(Failing(), every=5, delay=5), 4, fixed_shape=False, rule="linear")

    def rank(backend):
        with pytest.raises(RuntimeError) as caught:
            part(setting, backend.world, backend, None, 40, torch.zeros(1, 3, dtype=torch.float64))
        return str(caught.value)

    messages = run_ranks(rank, 3)
    assert set(messages) == {
        "the controller must choose a batch size, but after update 10 it failed with ZeroDivisionError: no machines; "
        "correct Failing() and restore the last checkpoint"
    }


BEGIN = torch.nn.Linear(1, 1)


class Growing:
    """It chooses another size at each question."""

    def __init__(self):
        self.size = 2

    def __call__(self, _):
        self.size += 2
        return self.size

    def __repr__(self):
        return "Growing()"


class RaisesOnce:
    """An observer that raises after an update, before the optimizer asks the controller."""

    def __init__(self, commits):
        self.left = commits

    def commit(self, commit):
        self.left -= 1
        if self.left == 0:
            raise KeyError

    def discard(self):
        pass


@pytest.mark.parametrize("update", [6, 7, 8, 11, 12, 13])
def test_ranks_that_have_asked_unequally_often_go_on_together_after_a_restore(update):
    def train(backend):
        world, sizes, model = backend.world, [], copy.deepcopy(BEGIN)
        trace = vbs.AdaptiveTrace(Growing(), start=2, every=5, delay=5)
        sampler = vbs.CustomSampler(400, trace, world.size, world.rank, 2, fixed_shape=False)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = vbs.ConstantOptimizer(inner, sampler, backend=backend)
        state, observer = None, RaisesOnce(update if world.rank else -1)
        optimizer.register(observer)
        for until in (update, 30):
            with suppress(KeyError):
                for batch in vbs.updates(sampler, optimizer):
                    for rows in batch:
                        optimizer.backward(model(torch.ones(len(rows), 1)).mean())
                        optimizer.step()
                    sizes.append(batch.batch_size)
                    if optimizer.updates == 5 and state is None:
                        state = copy.deepcopy(optimizer.state_dict())
                    if optimizer.updates == until:
                        break
            if until == update:
                optimizer.agreement.forget()  # as Checkpoint.restore() does
                optimizer.load_state_dict(copy.deepcopy(state))
        return sizes[-25:]

    first, second = run_ranks(train, 2)
    assert first == second
    assert len(first) == 25


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_copy_of_a_sampler_goes_on_by_itself(copied):
    model, sampler, optimizer = build(small())
    for batch in sampler:
        train(model, optimizer, batch)
    other = copied(sampler)
    other.set_epoch(1)
    sampler.set_epoch(1)
    assert list(other) == list(sampler)
    assert runs_of(other) == runs_of(sampler)


def setting(start, every=10):
    trace = vbs.AdaptiveTrace(Wild(3, needs_noise=False), start=start, every=every, delay=8)
    return Setting(trace, 4, False, "linear")


def test_a_restored_training_warns_if_it_is_asked_at_other_updates_and_not_of_another_start():
    state, weights, _ = trained(setting(8), [(1, 30)])
    part(setting(9), World(), None, state, 40, weights)
    with pytest.warns(UserWarning, match=r"chosen by .*, every=10, delay=8, and are by .*, every=7, delay=8 from now"):
        part(setting(8, every=7), World(), None, state, 40, weights)


@pytest.mark.parametrize("stop", [7, 30, 50])
@pytest.mark.parametrize("every", [5, 50, None])
def test_a_training_goes_on_with_a_controller_that_reads_the_noise(stop, every):
    before = vbs.AdaptiveTrace(ConstantBatch(16), every=every, delay=9)
    after = vbs.AdaptiveTrace(smoothed(NoiseScale(), 0.5, 1), start=16, every=5, delay=9)
    state, weights, _ = trained(Setting(before, 4, False, "linear"), [(1, stop)])
    with pytest.warns(UserWarning, match="^Resumed with another AdaptiveTrace"):
        _, _, runs = part(Setting(after, 4, False, "linear"), World(), None, state, 90, weights)
    assert runs[0] == (0, 16)
    assert len(runs) > 1


def test_ranks_are_told_what_their_controller_is():
    def rank(backend):
        kind = Setting(vbs.AdaptiveTrace(PerDevice(8), bounds=(1, 30 + backend.world.rank)), 4, False, "linear")
        part(kind, backend.world, backend, None, 40, torch.zeros(1, 3, dtype=torch.float64))

    controller = r"PerDevice\(samples=8\), bounds=\(1, 3"
    told = rf"controller with its arguments, but it is {controller}0\).* on rank 0 and {controller}1\).* on rank 1"
    with pytest.raises(RuntimeError, match=told):
        run_ranks(rank, 2)


def test_ranks_and_later_runs_are_told_what_a_function_has_from_around_it():
    def setting_of(size):
        trace = vbs.AdaptiveTrace(smoothed(ConstantBatch(size), 0.5, 1), start=8, every=5, delay=9)
        return Setting(trace, 4, False, "linear")

    def rank(backend):
        size = 20 + backend.world.rank
        part(setting_of(size), backend.world, backend, None, 40, torch.zeros(1, 3, dtype=torch.float64))

    with pytest.raises(RuntimeError, match=r"batch_size=20\), .*weight=.* on rank 0 and .*batch_size=21\).* on rank 1"):
        run_ranks(rank, 2)
    state, weights, runs = trained(setting_of(20), [(1, 30)])
    assert runs[0] == (0, 8)
    assert runs[-1][1] == 20
    part(setting_of(20), World(), None, state, 40, weights)  # does not warn
    with pytest.warns(UserWarning, match=r"chosen by .*batch_size=20\), .* are by .*batch_size=21\), .*weight="):
        _, _, runs = part(setting_of(21), World(), None, state, 60, weights)
    assert runs[-1][1] == 21


def test_bounds_may_be_an_array():
    trace = vbs.AdaptiveTrace(PerDevice(8), bounds=np.array([1, 5]))
    assert vbs.CustomSampler(100, trace, num_replicas=1, rank=0).max_batch_size == 5


def test_a_loader_in_a_thread_waits_says_so_and_ends_when_nobody_reads(monkeypatch):
    monkeypatch.setattr(decided, "WARN_SECONDS", 0.0)
    monkeypatch.setattr(decided, "WAIT_SECONDS", 0.001)
    trace = vbs.AdaptiveTrace(PerDevice(4), every=2, delay=4)
    sampler = vbs.CustomSampler(100, trace, num_replicas=1, rank=0, minibatch_size=4)
    optimizer = vbs.CustomOptimizer(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1), sampler, 4)
    sizes = []
    thread = threading.Thread(target=lambda: sizes.extend(map(len, sampler)), daemon=True)
    with warnings.catch_warnings(record=True, action="always") as told:
        thread.start()
        while not told:
            time.sleep(0.001)
        assert sizes == [4] * 6  # known at the beginning
        optimizer.discard_step()  # nobody reads this iteration any more
        thread.join()
    assert str(told[0].message).endswith("pass delay=num_workers * prefetch_factor + 4 to the AdaptiveTrace")
    assert len(told) == 1
