"""Another sampler for a training that goes on: the updates are those of whole batches, wherever a run resumes."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import batches
from variable_batch_size.testing import run_ranks

REF, LR = 8, 0.05
BEGIN = nn.Linear(3, 2, dtype=torch.float64)


def samples(size, number):
    """The dataset of a stage."""
    return TensorDataset(torch.randn(size, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64))


class Stages:
    """A training of several stages, each (samples, batch sizes, rows of a microbatch)."""

    def __init__(self, backend, stages, *, fixed_shape=None):
        self.backend, self.stages, self.fixed_shape = backend, stages, fixed_shape
        self.model = copy.deepcopy(BEGIN)
        inner = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
        self.optimizer = vbs.LinearRuleOptimizer(inner, self.sampler(0), REF, backend=backend)
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.schedule = vbs.ProgressScheduler(schedule, self.optimizer, by="updates")
        self.average = vbs.WeightAverage(self.model.parameters(), 0.9, self.optimizer)
        self.counted = []

    def sampler(self, number):
        size, sizes, rows = self.stages[number]
        world = self.backend.world
        options = {"on_end": "stop", "fixed_shape": self.fixed_shape, "seed": number}
        return vbs.CustomSampler(samples(size, number), sizes, world.size, world.rank, rows, **options)

    def train(self, until=None):
        """Run the script: all loops of all stages, also after a restore; return whether it has ended."""
        optimizer = self.optimizer
        for number, (size, *_) in enumerate(self.stages):
            if number:
                optimizer.continue_with(self.sampler(number))
            loader = DataLoader(samples(size, number), batch_sampler=optimizer.sampler)
            for _ in vbs.remaining_epochs(optimizer.sampler, optimizer):
                for update in vbs.updates(loader, optimizer):
                    for (rows,) in update:
                        optimizer.backward(self.model(rows).square().mean())
                        optimizer.step()
                    self.schedule.step()
                    self.counted.append((optimizer.stage, optimizer.updates, optimizer.samples))
                    if optimizer.updates == until:
                        return self
        return self

    def state(self):
        return {name: copy.deepcopy(getattr(self, name).state_dict()) for name in self.parts}

    parts = "model", "optimizer", "schedule", "average"

    def load(self, state):
        for name in self.parts:
            getattr(self, name).load_state_dict(copy.deepcopy(state[name]))  # torch keeps tensors of the state
        return self

    def results(self):
        return [parameter.tolist() for parameter in (*self.model.parameters(), *self.average.averages)]


def twin(stages):
    """Whole batches in one loop: the weights at the end, and what is counted after each update."""
    model, counted, made, used = copy.deepcopy(BEGIN), [], 0, 0
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    for number, (size, sizes, _) in enumerate(stages):
        (data,) = samples(size, number).tensors
        for indices in batches(sizes, size, number):
            inner.param_groups[0]["lr"] = LR / (1 + made) * len(indices) / REF
            inner.zero_grad()
            model(data[torch.as_tensor(indices)]).square().mean().backward()
            inner.step()
            made, used = made + 1, used + len(indices)
            counted.append((number, made, used))
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average.lerp_(parameter.detach(), 1 - 0.9 ** (len(indices) / REF))
    return [parameter.tolist() for parameter in (*model.parameters(), *averages)], counted


@st.composite
def stage(draw):
    size = draw(st.integers(5, 40))
    return size, draw(st.lists(st.integers(1, size), min_size=1, max_size=5)), draw(st.integers(1, 9))


worlds = st.integers(1, 3)


@given(
    stages=st.lists(stage(), min_size=2, max_size=3),
    stop=st.integers(1, 12),
    before=worlds,
    after=worlds,
    again=st.booleans(),
)
@examples(100)
def test_stages_are_one_training_in_any_world_from_any_state(stages, stop, before, after, again):
    """`again`: the restored state is saved before its stage is reached, and that one resumes."""
    expected, counted = twin(stages)
    stop = min(stop, len(counted) - 1) or None
    first = run_ranks(lambda backend: Stages(backend, stages).train(stop), before)
    assert all(run.counted == counted[:stop] for run in first)
    if stop is None:
        runs = first
    else:
        state = first[0].state()
        if again:
            waiting = Stages(vbs.backend.LocalBackend(), stages).load(state)
            assert (waiting.optimizer.updates, waiting.optimizer.samples) == counted[stop - 1][1:]
            state = waiting.state()
        runs = run_ranks(lambda backend: Stages(backend, stages).load(state).train(), after)
        assert all(run.counted == counted[stop:] for run in runs)
    for run in runs:
        for found, right in zip(run.results(), expected, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(right), rtol=1e-12, atol=1e-12)


SOME = [(20, [4, 8, 8], 4), (30, [6, 6], 3)]


def alone():
    return Stages(vbs.backend.LocalBackend(), SOME)


def test_the_sampler_before_is_read_no_more():
    run = alone()
    before = run.optimizer.sampler
    run.train()
    assert (before.updates, run.optimizer.sampler.updates, run.optimizer.updates) == (3, 5, 5)
    with pytest.raises(RuntimeError, match="has gone on with another one"):
        next(iter(before))


def test_a_state_of_an_earlier_stage_comes_before_the_next_one():
    state = alone().train(2).state()
    run = alone().train()
    with pytest.raises(ValueError, match="a state of stage 1 is needed here, got one of stage 0"):
        run.optimizer.load_state_dict(state["optimizer"])


def test_the_rows_of_a_later_stage_are_compared_when_it_begins():
    state = alone().train(4).state()
    run = Stages(vbs.backend.LocalBackend(), [SOME[0], (31, [6, 6], 3)]).load(state)
    with pytest.raises(ValueError, match="dataset_size was 30 and is 31"):
        run.train()


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda run: run.optimizer.sampler, "one that another optimizer reads"),
        (lambda run: vbs.CustomSampler(20, 4, 1, 0, reproducible=True), "reproducible=True after False"),
        (lambda run: vbs.CustomSampler(20, vbs.AdaptiveTrace(vbs.adaptive.PerDevice(4)), 1, 0), "a new AdaptiveTrace"),
        (lambda run: vbs.CustomSampler(20, 4, 2, 0), "the sampler deals for rank 0 of 2"),
        (lambda run: DataLoader([1]), r"\(DataLoader\)"),
    ],
)
def test_what_a_training_cannot_go_on_with_is_refused(wrong, found):
    run = alone()
    with pytest.raises((TypeError, ValueError), match=found):
        run.optimizer.continue_with(wrong(run))
    assert alone().train().results() == run.train().results()


def test_it_is_called_between_two_steps():
    run = alone()
    for rows in run.optimizer.sampler:
        run.optimizer.backward(run.model(samples(20, 0)[rows][0]).sum())
        run.optimizer.step()
        if run.optimizer.updates == 1:
            break
    for rows in run.optimizer.sampler:
        run.optimizer.backward(run.model(samples(20, 0)[rows][0]).sum())
        run.optimizer.step()
        with pytest.raises(RuntimeError, match=r"continue_with\(\) must be called between steps"):
            run.optimizer.continue_with(run.sampler(1))
        break


def test_it_is_called_after_the_step_of_a_microbatch():
    run = alone()
    rows = next(iter(run.optimizer.sampler))
    run.optimizer.backward(run.model(samples(20, 0)[rows][0]).sum())
    with pytest.raises(RuntimeError, match=r"a backward\(\) has come that no step\(\) has counted; call it after"):
        run.optimizer.continue_with(run.sampler(1))


def test_a_restore_of_a_later_stage_is_told(caplog):
    state = alone().train(4).state()
    run = alone().load(state)
    assert "The state is of stage 1: loops of earlier stages have ended" in caplog.text
    assert (run.optimizer.stage, run.optimizer.updates) == (1, 4)


def test_all_optimizers_of_a_sampler_go_on():
    one, other = nn.Linear(3, 1), nn.Linear(3, 1)
    sampler = vbs.CustomSampler(12, 4, 1, 0, minibatch_size=2, epochs=1)
    first, second = (vbs.ConstantOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), sampler) for m in (one, other))

    def train(sampler):
        for rows in sampler:
            loss = one(torch.ones(len(rows), 3)).mean() + other(torch.ones(len(rows), 3)).mean()
            first.backward(loss, others=second)
            first.step()
            second.step()

    train(sampler)
    first.continue_with(vbs.CustomSampler(10, 5, 1, 0, minibatch_size=2))
    assert first.sampler is second.sampler is not sampler
    train(first.sampler)
    assert (first.updates, second.updates, first.samples, second.stage) == (5, 5, 22, 1)


def test_a_second_wrapper_is_refused_while_the_first_goes_on():
    """Schedules, averages and the tracker of the first one would stand still."""
    run = alone().train(2)
    inner = run.optimizer.inner
    with pytest.raises(RuntimeError, match=r"another one has made 2 updates with another sampler; call .*continue_wit"):
        vbs.LinearRuleOptimizer(inner, run.sampler(1), REF)
    expected = alone().train().results()
    assert run.train.__self__ is run
    del run.schedule, run.average, run.optimizer
    assert vbs.LinearRuleOptimizer(inner, alone().sampler(1), REF).updates == 0
    assert expected


def test_a_later_controller_may_need_the_throughput():
    found = []

    class Constant:
        def __call__(self, _):
            return 2

        def __repr__(self):
            return type(self).__name__

    class Timed(Constant):
        needs_throughput = True

        def __call__(self, input):
            found.append(input.throughput)
            return [2, 4][len(found) % 2]

    def sampler(controller):
        trace = vbs.AdaptiveTrace(controller, start=2, every=5, delay=4)
        return vbs.CustomSampler(400, trace, 1, 0, 2, max_updates=60)

    def train(state=None):
        weight = nn.Parameter(torch.zeros(()))
        optimizer = vbs.ConstantOptimizer(torch.optim.SGD([weight], lr=0.1), sampler(Constant()))
        if state is not None:
            optimizer.load_state_dict(state)
        for number in range(2):
            if number:
                optimizer.continue_with(sampler(Timed()))
            for update in vbs.updates(optimizer.sampler, optimizer):
                for _ in update:
                    optimizer.backward(weight.square())
                    optimizer.step()
                if optimizer.updates == 100:
                    state = copy.deepcopy(optimizer.state_dict())
        return state

    state = train()
    assert any(throughput is not None for throughput in found)
    assert "stopwatch" in state["vbs"]
    found.clear()
    train(state)
    assert len(found) > 1
    assert None not in found[1:]  # the first question is that of the sampler


def test_the_counts_of_a_stage_are_its_own():
    """Also if its first batch is that of the stage before."""
    counts = [[2.0, 4.0], [16.0, 32.0]]

    def train(backend):
        optimizer = Stages(backend, [(2, [2], 1), (2, [2], 1)]).optimizer
        found = []
        for number in range(2):
            if number:
                world = backend.world
                optimizer.continue_with(vbs.CustomSampler(2, 2, world.size, world.rank, 1))
            updates = vbs.updates(
                optimizer.sampler, optimizer, counts=lambda rows, of=counts[number]: {"n": sum(of[row] for row in rows)}
            )
            for update in updates:
                found.append(update.counts["n"])
                for rows in update:
                    loss = optimizer.param_groups[0]["params"][0].sum() * len(rows) / update.counts["n"]
                    optimizer.backward(loss, divided=True)
                    optimizer.step()
        return found

    assert run_ranks(train, 2) == [[6.0, 48.0]] * 2


def test_metrics_of_a_stage_begin_with_it():
    run = alone()
    metrics, means = vbs.Accumulator(run.optimizer), []
    for number in range(2):
        if number:
            run.optimizer.continue_with(run.sampler(1))
        for epoch in vbs.remaining_epochs(run.optimizer.sampler, run.optimizer):
            metrics.set_epoch(epoch)
            for update in vbs.updates(run.optimizer.sampler, run.optimizer):
                for rows in update:
                    run.optimizer.backward(run.model(samples(40, 0)[rows][0]).square().mean())
                    metrics.add(value=float(number))
                    run.optimizer.step()
            means.append(metrics.read())
    assert means == [{"samples": 20, "value": 0.0}, {"samples": 12, "value": 1.0}]


def test_the_state_of_a_sampler_alone_leaves_the_stage_to_its_optimizer():
    same = [(20, [4, 8, 8], 4)] * 2
    state = Stages(vbs.backend.LocalBackend(), same).train(4).state()
    run = Stages(vbs.backend.LocalBackend(), same)
    run.optimizer.sampler.load_state_dict(state["optimizer"]["vbs"]["sampler"])
    assert run.load(state).train().optimizer.updates == 6


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_checkpoint_resumes_a_stage_with_its_random_numbers(stop, tmp_path):
    def run(folder, until=None):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        samplers = [vbs.CustomSampler(samples(12, n), 4, 1, 0, 2, epochs=1, seed=n) for n in range(2)]
        optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), samplers[0])
        with vbs.Checkpoint(folder, model=model, optimizer=optimizer, every=1) as saves:
            saves.restore()
            for number, sampler in enumerate(samplers):
                if number:
                    optimizer.continue_with(sampler)
                loader = DataLoader(samples(12, number), batch_sampler=sampler)
                for _ in vbs.remaining_epochs(sampler, optimizer):
                    for update in vbs.updates(loader, optimizer):
                        for (rows,) in update:
                            optimizer.backward(model(rows).square().mean())
                            optimizer.step()
                        saves.step()
                        if optimizer.updates == until:
                            return None
        return [parameter.tolist() for parameter in model.parameters()]

    expected = run(tmp_path / "whole")
    run(tmp_path / "stopped", stop)
    assert run(tmp_path / "stopped") == expected
