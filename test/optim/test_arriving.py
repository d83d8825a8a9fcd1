"""Batches that arrive: each update is that of the plain loop over the rows of all ranks, whatever each has brought."""

import copy
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

import variable_batch_size as vbs
from helpers.arrivals import REF, SGD, Arriving
from helpers.processes import run_job
from helpers.properties import examples
from helpers.reference import assert_equal, data, network, training
from helpers.worlds import Layout, Place


def weights_of(model):
    return [parameter.detach().numpy() for parameter in model.parameters()]


@given(st.integers(0, 10**6), st.integers(1, 4))
@examples(100)
def test_updates_are_those_of_whole_batches(seed, world):
    case, models = Arriving.drawn(seed, world), [network() for _ in range(world)]
    weights, samples, updates = case.expected()
    optimizers = vbs.testing.run_ranks(lambda backend: case.train(backend, models[backend.world.rank]), world)
    for model, optimizer in zip(models, optimizers, strict=True):
        assert_equal(weights_of(model), weights)
        assert (optimizer.samples, optimizer.updates) == (samples, updates)


def arrive(backend, layout):
    place = Place.of(layout, backend)
    for seed in range(12):
        case, model = Arriving.drawn(seed, layout.size), place.spread(network())
        weights, *counted = case.expected()
        optimizer = case.train(backend, model)
        whole = [getattr(one, "full_tensor", lambda one=one: one)().detach().numpy() for one in model.parameters()]
        assert_equal(whole, weights)
        assert [optimizer.samples, optimizer.updates] == counted


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("layout", [Layout(3, by="plain"), Layout(3, by="ddp"), Layout(shards=3)], ids=str)
def test_processes_make_the_same_updates_whatever_sums(layout):
    run_job("gloo", arrive, layout, ranks=3)


def one_bad_row(backend, layout, begins):
    """A row that is not finite, and updates in which rank 1 has no rows and repeats an earlier microbatch.

    The row is one of rank 1, in the second update; or, if the training `begins` with it, one of rank 0.
    """
    place = Place.of(layout, backend)
    model = place.spread(network())
    inner = torch.optim.SGD(model.parameters(), **SGD)
    source, passed = vbs.ArrivingBatches(4), model if layout.by != "plain" else None
    optimizer = vbs.ConstantOptimizer(inner, source, REF, noise="microbatches", model=passed)
    batches = [torch.full((6, 3), 0.1 * number, dtype=torch.float64) for number in range(5)]
    if begins and backend.world.rank == 0:
        batches[0][5] = float("inf")
    elif begins:
        batches[:3] = None, None, None
    elif backend.world.rank == 1:
        batches[1][5] = float("inf")
        batches[2:4] = None, None
    made = []
    for update in vbs.updates(batches, optimizer):
        for x in update:
            optimizer.backward(model(x).square().sum(dim=1).mean())
            updated = optimizer.step()
        made.append(updated)
    return made


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("layout", [Layout(2, by="plain"), Layout(2, by="ddp"), Layout(shards=2)], ids=str)
@pytest.mark.parametrize("begins", [False, True])
def test_a_microbatch_that_is_not_finite_is_not_repeated(layout, begins):
    made = [not begins, begins, True, True, True]
    assert run_job("gloo", one_bad_row, layout, begins, ranks=2) == 2 * [made]


class Endless:
    """Batches of a rank, as an iterator that a new loop goes on with."""

    def __init__(self, rank, *, idle):
        self.generator, self.left, self.idle = torch.Generator().manual_seed(rank), 6, idle

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return (
            None
            if self.idle and self.left in (3, 4)
            else torch.randn(8, 3, generator=self.generator, dtype=torch.float64)
        )


@pytest.mark.parametrize(("trace", "shards"), [(None, 0), ("0:16", 1), ("0:11 2:5", 2), ("0:11 2:5", 3)])
@pytest.mark.parametrize("idle", [-1, 0, 1])
@pytest.mark.parametrize("place", [0, 3, "counts", "totals"])
def test_one_rank_may_discard_a_step_and_begin_it_again(trace, shards, idle, place):
    """As after an exception in a microbatch of it, or before it: no row is lost, and the other rank need not know."""

    def one(backend, fails):
        rank, model, failed = backend.world.rank, network(), not fails

        def fail():
            nonlocal failed
            if rank == 0 and optimizer.updates == 2 and not failed:
                failed = True
                raise KeyError

        def counts(batch):
            if place == "counts":
                fail()
            return np.ones(len(batch), dtype=np.int64)

        def totals(batch):
            if place == "totals":
                fail()
            return {"rows": len(batch)}

        batches = Endless(rank, idle=rank == idle)
        streams = trace and [Endless(number, idle=False) for number in range(shards)]
        source = vbs.ArrivingBatches(4, counts=counts, trace=trace, streams=streams, num_replicas=2, rank=rank)
        optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), **SGD), source, backend=backend)
        while True:
            try:
                for update in vbs.updates(source if trace else batches, optimizer, counts=totals):
                    for index, x in enumerate(update):
                        optimizer.backward(model(x).square().sum() / update.counts["rows"], divided=True)
                        if not isinstance(place, str) and index == place % len(update):
                            fail()
                        optimizer.step()
            except KeyError:
                optimizer.discard_step()
            else:
                return [optimizer.samples, *(one.tolist() for one in model.parameters())]

    expected = vbs.testing.run_ranks(lambda backend: one(backend, fails=False), 2)
    assert vbs.testing.run_ranks(lambda backend: one(backend, fails=True), 2) == expected


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_cannot_make_its_first_microbatch_makes_it_when_asked_again(fails):
    """Also if another rank waits for it, to repeat it."""

    def one(backend):
        rank, model, failed = backend.world.rank, network(), not fails

        def collate(rows):
            nonlocal failed
            if rank == 0 and not failed:
                failed = True
                raise KeyError
            return torch.stack(rows)

        source = vbs.ArrivingBatches(4, collate_fn=collate, num_replicas=2, rank=rank)
        optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), **SGD), source, backend=backend)
        generator = torch.Generator().manual_seed(rank)
        rows = [list(torch.randn(8, 3, generator=generator, dtype=torch.float64)) for _ in range(3)]
        batches = iter([None, *rows[1:]] if rank else rows)
        for _ in range(1 + (fails and rank == 0)):
            try:
                for update in vbs.updates(batches, optimizer):
                    for x in update:
                        optimizer.backward(model(x).square().sum(dim=1).mean())
                        optimizer.step()
            except KeyError:
                optimizer.discard_step()
        return optimizer.samples, failed

    assert vbs.testing.run_ranks(one, 2) == [(40, True), (40, not fails)]


PAIRS = [(5, 5), (2, 9), (0, 5), (9, 0), (1, 1)]  # rows of two ranks


def train_two(backend):
    """Train two models in DistributedDataParallel, an actor and a critic, one after the other in each microbatch."""
    source, place, pairs = vbs.ArrivingBatches(2), Place.of(Layout(2, by="ddp"), backend), []
    for _ in range(2):
        model = place.spread(network())
        inner = torch.optim.SGD(model.parameters(), **SGD)
        pairs.append((model, vbs.LinearRuleOptimizer(inner, source, REF, model=model)))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(sum(pair), 3, generator=generator, dtype=torch.float64) for pair in PAIRS]
    own = [one[first:] if backend.world.rank else one[:first] for one, (first, _) in zip(rows, PAIRS, strict=True)]
    for update in vbs.updates(own, pairs[0][1]):
        for x in update:
            for model, optimizer in pairs:
                optimizer.backward(model(x).square().sum(dim=1).mean())
                optimizer.step()
    whole = network()
    inner = torch.optim.SGD(whole.parameters(), **SGD)
    for x in rows:
        inner.zero_grad()
        whole(x).square().sum(dim=1).mean().backward()
        inner.param_groups[0]["lr"] = SGD["lr"] * len(x) / REF
        inner.step()
    for model, _ in pairs:
        assert_equal(weights_of(model), weights_of(whole))


@pytest.mark.slow("starts processes")
def test_two_optimizers_whose_models_wait_in_forward_and_backward():
    run_job("gloo", train_two, ranks=2)


def arriving(kind=vbs.LinearRuleOptimizer, **options):
    """A model and its optimizer, alone."""
    model, place = network(), {"num_replicas": 1, "rank": 0}
    source = vbs.ArrivingBatches(**{"minibatch_size": 4, **place, **options})
    return model, kind(torch.optim.SGD(model.parameters(), **SGD), source, REF)


def train(model, optimizer, batches):
    """Train, and return the rows of all microbatches."""
    rows = []
    for update in vbs.updates(batches, optimizer):
        for x, target in update:
            rows.append(len(x))
            optimizer.backward((model(x) - target).square().sum(dim=1).mean())
            optimizer.step()
    return rows


SIZES = [9, 4, 17, 1, 12]


def batches_of(sizes):
    x, target = data(sum(sizes))
    return list(zip(x.split(sizes), target.split(sizes), strict=True))


def test_noise_and_gain_are_those_of_a_sampler_with_the_same_microbatches():
    model, optimizer = arriving(vbs.AdaScaleOptimizer)
    assert train(model, optimizer, batches_of(SIZES)) == [3, 3, 3, 4, 3, 3, 3, 4, 4, 1, 4, 4, 4]
    dealt = {"dataset_size": sum(SIZES), "ref_batchsize": REF, "hyperparameters": SGD}
    run = training(vbs.AdaScaleOptimizer, SIZES, **dealt, sampling={"shuffle": False}).run(len(SIZES))
    assert_equal(weights_of(model), run.weights(), 1e-14)
    assert astuple(optimizer.noise()) == pytest.approx(astuple(run.optimizer.noise()), rel=1e-12)
    expected = run.optimizer.progress, run.optimizer.lr_factor()
    assert (optimizer.progress, optimizer.lr_factor()) == pytest.approx(expected, rel=1e-12)


def test_the_noise_of_several_ranks_is_that_of_their_microbatches():
    x, target = data(23)
    bounds, model, seen = [0, 9, 9, 23], network(), []  # the second rank has no rows

    def one(backend):
        own, rank = network(), backend.world.rank
        source = vbs.ArrivingBatches(4, num_replicas=3, rank=rank)
        inner = torch.optim.SGD(own.parameters(), **SGD)
        optimizer, start = vbs.AdaScaleOptimizer(inner, source, REF, backend=backend), bounds[rank]
        batch = slice(bounds[rank], bounds[rank + 1])
        for update in vbs.updates([(x[batch], target[batch])], optimizer):
            for rows in update:
                if optimizer.microbatch.samples:
                    seen.append(slice(start, start := start + len(rows[0])))
                optimizer.backward((own(rows[0]) - rows[1]).square().mean())
                optimizer.step()
        return optimizer

    noise = vbs.testing.run_ranks(one, 3)[1].noise()
    assert sorted(part.stop - part.start for part in seen) == [3, 3, 3, 3, 3, 4, 4]

    def gradient(rows):
        loss = (model(x[rows]) - target[rows]).square().mean()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).numpy()

    a = sum((part.stop - part.start) / 23 * float(np.square(gradient(part)).sum()) for part in seen)
    g2 = float(np.square(gradient(slice(23))).sum())
    assert noise.sigma2 == pytest.approx(23 * (a - g2) / 6, rel=1e-12)
    assert noise.mu2 == pytest.approx((7 * g2 - a) / 6, rel=1e-12)


def test_a_state_resumes_with_another_microbatch():
    batches = batches_of(SIZES)
    model, optimizer = arriving()
    train(model, optimizer, batches)
    first, early = arriving()
    train(first, early, batches[:2])
    state = copy.deepcopy((first.state_dict(), early.state_dict()))
    second, later = arriving(minibatch_size=5)
    second.load_state_dict(state[0])
    later.load_state_dict(state[1])
    assert (later.updates, later.samples) == (2, 13)
    train(second, later, batches[2:])
    assert_equal(weights_of(second), weights_of(model))
    assert (later.updates, later.samples, later.progress) == (5, sum(SIZES), optimizer.progress)


def test_a_state_of_a_sampler_is_not_one_of_batches_that_arrive():
    run = training().run(2)
    _, optimizer = arriving()
    with pytest.raises(ValueError, match=r"can be restored only with the samples it was saved with, but dataset_size"):
        optimizer.load_state_dict(run.optimizer.state_dict())
    train(*arriving(), batches_of([3]))
    with pytest.raises(ValueError, match=r"can be restored only with the samples it was saved with, but dataset_size"):
        run.optimizer.load_state_dict(optimizer.state_dict())


# -------------------------------------------------------------------------------------------------------- wrong usage


def leave_out(model, optimizer, *, discard):
    """Train on the first microbatch of each update, and forget or discard the others."""
    for update in vbs.updates(batches_of(SIZES), optimizer):
        x, target = next(iter(update))
        optimizer.backward((model(x) - target).square().mean())
        optimizer.step()
        if discard:
            optimizer.discard_step()


def test_a_microbatch_that_does_not_reach_step_raises():
    model, optimizer = arriving()
    with pytest.raises(RuntimeError, match=r"update 0 is not complete, but the loop asks for the next one; l"):
        leave_out(model, optimizer, discard=False)
    with pytest.raises(RuntimeError, match=r"update 0 is not complete"):  # nor does a new loop forget it
        train(model, optimizer, batches_of(SIZES))
    optimizer.discard_step()
    train(model, optimizer, batches_of(SIZES))
    assert optimizer.updates == len(SIZES)


def test_a_loop_ends_after_its_step_is_discarded():
    with pytest.raises(RuntimeError, match=r"the loop must end after discard_step\(\) or load_state_dict\(\)"):
        leave_out(*arriving(), discard=True)


def test_a_step_without_a_batch_raises():
    model, optimizer = arriving()
    x, target = data(4)
    train(model, optimizer, [(x, target)])
    (model(x) - target).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"update 1 has yielded none yet; .* vbs\.updates\(loader, optimizer"):
        optimizer.step()


# ---------------------------------------------------------------------------------------------------------- the pieces


class Pairs(Dataset[Any]):
    """Rows whose fields a loader collates to a list of tensors, tuples and dicts, in any order."""

    def __init__(self, order):
        self.order = order

    def __len__(self):
        return 96

    def __getitem__(self, index):
        fields = (torch.full((3,), float(index)), f"row {index}", (torch.ones(2), index), {"id": index})
        return tuple(fields[field] for field in self.order)


@pytest.mark.parametrize("trace", [None, "0:40"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 2), (2, 0), (3, 0), (0, 1, 2, 3), (1, 3, 0, 2)])
def test_the_rows_of_a_loader_are_counted_whatever_its_fields(order, trace):
    model = nn.Linear(3, 1)
    loader = DataLoader(Pairs(order), batch_size=32)
    source = vbs.ArrivingBatches(64, trace=trace, streams=trace and [loader], num_replicas=1, rank=0)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), source)
    used = []
    for update in vbs.updates(source if trace else loader, optimizer):
        for batch in update:
            field = dict(zip(order, batch, strict=True))
            numbers = field[0][:, 0].tolist()
            used += numbers
            assert [*field.get(1, ())] in ([], [f"row {number:.0f}" for number in numbers])
            assert field[2][1].tolist() == numbers if 2 in field else True
            assert field[3]["id"].tolist() == numbers if 3 in field else True
            optimizer.backward(model(field[0]).mean())
            optimizer.step()
    assert used == [*range(96)]
    assert (optimizer.updates, optimizer.samples) == (3, 96)


def test_a_rank_without_rows_at_first_gets_a_row_that_can_be_sent():
    def one(backend):
        model = nn.Linear(3, 2).double()
        source = vbs.ArrivingBatches(2, collate_fn=list, num_replicas=2, rank=backend.world.rank)
        optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), source, backend=backend)
        for _ in vbs.updates([[object()] if backend.world.rank else []], optimizer):
            return

    with pytest.raises(RuntimeError, match=r"rows that are read ahead or sent, must be tensors, numbers and strings"):
        vbs.testing.run_ranks(one, 2)


def test_synchronized_batch_normalization_needs_equal_rounds():
    def one(backend):
        model, rank = nn.Sequential(nn.Linear(3, 2), nn.SyncBatchNorm(2)).double(), backend.world.rank
        source = vbs.ArrivingBatches(2, num_replicas=2, rank=rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = vbs.ConstantOptimizer(inner, source, backend=backend, model=model)
        for update in vbs.updates([data(1 + 2 * rank)[0]], optimizer):
            list(update)

    with pytest.raises(ValueError, match=r"must compute 2 microbatches in update 0, .* 1 rows on rank 0; bring"):
        vbs.testing.run_ranks(one, 2)
