"""Abilities of users: a `vbs.Stage` that is passed to `optimizer.register`."""

import copy
import itertools

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.testing import run_ranks

SIZES = [9, 4, 14, 7, 2, 12, 5, 7]  # of an epoch
DATA = torch.randn(60, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
BEGIN = nn.Linear(3, 1, dtype=torch.float64)


class Watch(vbs.Stage):
    """Sums the samples, and a float of them, and skips updates whose float is in an odd unit."""

    name, by_microbatch = "watch", True

    def __init__(self, decision=bool):
        self.found, self.decision = [], decision
        self.clear()

    def add(self, counted, squares, like):
        microbatch = counted.microbatch
        value = float(DATA[microbatch.start : microbatch.start + microbatch.samples].sum())
        self._sum = self._sum + torch.tensor([microbatch.samples, value], dtype=torch.float64)

    def part(self, like):
        return [self._sum]

    def judge(self, update):
        samples, value = update.message[self.name][0].tolist()
        self.found.append((int(samples), value, {name: float(mean) for name, mean in update.means.items()}))
        update.skip(self.decision(int(abs(value)) % 2 == 1))

    def clear(self):
        self._sum = torch.zeros(2, dtype=torch.float64)

    def state_dict(self):
        return {"watch": len(self.found)}

    def check_state(self, state):
        if state.get("watch", 0) < 0:
            raise ValueError("damaged")

    def load_state_dict(self, state):
        self.loaded = state.get("watch")


def build(backend, stage, **sampling):
    model = copy.deepcopy(BEGIN)
    world = backend.world
    sampler = vbs.CustomSampler(60, SIZES, world.size, world.rank, minibatch_size=4, shuffle=False, **sampling)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sampler, 8, backend=backend)
    optimizer.register(stage)
    return model, optimizer


def train(backend, stage, **sampling):
    """Return the weights after each update of an epoch, and what the stage has found."""
    model, optimizer = build(backend, stage, **sampling)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(DATA), batch_sampler=optimizer.sampler)
    weights = []
    for update in vbs.updates(loader, optimizer):
        for (rows,) in update:
            loss = model(rows).square().mean()
            optimizer.backward(loss)
            optimizer.log(loss=loss)
            optimizer.step()
        weights.append(model.weight.tolist())
    return weights, stage.found, optimizer.updates


def twin():
    """One process and one batch an update, without this library's sums."""
    model, start, weights, found = copy.deepcopy(BEGIN), 0, [], []
    for size in SIZES:
        rows = DATA[start : start + size]
        start += size
        loss = model(rows).square().mean()
        model.zero_grad()
        loss.backward()
        found.append((len(rows), float(rows.sum()), {"loss": loss.item()}))
        if int(abs(found[-1][1])) % 2 == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * size / 8 * parameter.grad
        weights.append(model.weight.tolist())
    return weights, found


@pytest.mark.parametrize("decision", [bool, torch.tensor])
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_stage_sums_over_microbatches_and_ranks_and_skips(world, reproducible, decision):
    weights, found = twin()
    skipped = [before == after for before, after in itertools.pairwise(weights)]
    assert any(skipped)
    assert not all(skipped)
    ranks = run_ranks(lambda backend: train(backend, Watch(decision), reproducible=reproducible), world)
    for of_rank, seen, updates in ranks:
        assert updates == len(weights) == len(of_rank)
        torch.testing.assert_close(torch.tensor(of_rank), torch.tensor(weights), rtol=0, atol=1e-12)
        assert [samples for samples, *_ in seen] == [samples for samples, *_ in found]
        for (_, value, means), (_, expected, expected_means) in zip(seen, found, strict=True):
            assert value == pytest.approx(expected, abs=1e-12)
            assert means == pytest.approx(expected_means, abs=1e-6)


def test_floats_that_would_be_cut_are_refused():
    stage = Watch()
    stage.by_microbatch = False
    with pytest.raises(ValueError, match=r"sums without an order, got floats of the stage 'watch'; say by_microbatch"):
        run_ranks(lambda backend: train(backend, stage, reproducible=True), 1)


def test_a_stage_saves_checks_and_loads_its_own_part_of_a_state():
    stage = Watch()

    def states(backend):
        _, optimizer = build(backend, stage)
        state = optimizer.state_dict()
        other = Watch()
        _, again = build(backend, other)
        again.load_state_dict(state)
        state["vbs"]["watch"] = -1
        with pytest.raises(ValueError, match="damaged"):
            again.load_state_dict(state)
        return other.loaded

    assert run_ranks(states, 1) == [0]


def test_a_stage_is_registered_between_steps():
    def register(backend):
        model, optimizer = build(backend, Watch())
        (indices, *_) = optimizer.sampler
        model(DATA[indices]).mean().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"^register\(\) must be called between steps"):
            optimizer.register(Watch())
        return True

    assert run_ranks(register, 1) == [True]


def registered(*stages, kind=vbs.LinearRuleOptimizer, **options):
    sampler = vbs.CustomSampler(60, 12, num_replicas=1, rank=0, minibatch_size=4, shuffle=False)
    model = copy.deepcopy(BEGIN)
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.01), sampler, 8, **options)
    for stage in stages:
        optimizer.register(stage)
    return model, optimizer


class Named(vbs.Stage):
    def __init__(self, name="", key=""):
        self.name, self.key, self.loaded = name, key, None

    def state_dict(self):
        return {self.key: 1} if self.key else {}

    def load_state_dict(self, state):
        self.loaded = state.get(self.key)


@pytest.mark.parametrize("name", ["mine", "means", "overflows", "squares"])
def test_a_name_of_another_stage_is_refused(name):
    stages = [Named("mine")]
    with pytest.raises(ValueError, match=rf"a name, and entries of its state, that no other has, got {name}; choose"):
        registered(*stages, Named(name), kind=vbs.AdaScaleOptimizer)


@pytest.mark.parametrize("key", ["mine", "progress", "noise", "counts"])
def test_an_entry_of_the_state_of_another_is_refused(key):
    with pytest.raises(ValueError, match=rf"that no other has, got {key}; choose"):
        registered(Named(key="mine"), Named(key=key), kind=vbs.AdaScaleOptimizer)


def test_a_stage_that_is_registered_after_a_state_was_loaded_gets_its_part():
    state = registered(Named(key="mine"))[1].state_dict()
    _, optimizer = registered()
    optimizer.load_state_dict(state)
    optimizer.register(late := Named(key="mine"))
    assert late.loaded == 1


class Squares(vbs.Stage):
    def needs(self, batch):
        return vbs.Needs(norm=True)

    def add(self, counted, squares, like):
        assert squares.norm is not None


def test_squares_are_measured_or_refused():
    with pytest.raises(ValueError, match=r'in an optimizer that measures them, got LinearRule.*; pass noise="micro'):
        registered(Squares())
    model, optimizer = registered(Squares(), noise="microbatches")
    for indices in optimizer.sampler:
        model(DATA[indices]).mean().backward()
        optimizer.step()
    assert optimizer.updates == 5


def test_a_skipped_update_whose_end_raises_needs_a_state():
    """What other stages have counted cannot be called back."""

    class Once(vbs.Stage):
        def end(self, update):
            raise OSError("disk full")

    model, optimizer = registered(Once(), skip_grad_norm=1e-9)
    for number, indices in enumerate(optimizer.sampler):  # the first update is made
        model(DATA[indices]).mean().backward()
        if number % 3 == 2:
            with pytest.raises(OSError, match="disk full"):
                optimizer.step()
            break
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"discard_step\(\) must be called .*; restore the states of model and"):
        optimizer.discard_step()
