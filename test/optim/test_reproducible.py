"""Updates that are the same to the last bit in any world: `CustomSampler(reproducible=True)`."""

import itertools
import math
import random
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import variable_batch_size as vbs
from helpers.models import Gan
from helpers.properties import examples
from helpers.reference import SIZES, assert_equal, training
from variable_batch_size.optim.reproducible import limbs
from variable_batch_size.testing import run_ranks

EXACT = {"reproducible": True}


# --------------------------------------------------------------------------------------------------- sums of integers


def summed(groups, weight=1.0):
    """The pair of integers of all numbers, of which each group was added somewhere else."""
    totals = []
    for group in groups:
        total = torch.zeros(2, 1, dtype=torch.int64)
        for number, x in enumerate(group):
            limbs.add(total, torch.tensor([x], dtype=torch.float64), weight)
            if number % limbs.CARRIED == limbs.CARRIED - 1:
                limbs.carry(total)
        limbs.carry(total)
        totals.append(total)
    total = torch.stack(totals).sum(0)
    limbs.carry(total)
    high, low = total.flatten().tolist()
    return high, low


numbers = st.lists(st.floats(-1e6, 1e6) | st.floats(-1e-12, 1e-12), min_size=1, max_size=40)


@given(numbers, st.data())
@examples(200)
def test_a_sum_of_integers_has_no_order(values, data):
    shuffled = data.draw(st.permutations(values))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=5)))
    groups = [shuffled[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(values)])]
    high, low = summed([values])
    assert summed(groups) == (high, low)
    assert -(2**53) <= low < 2**53
    exact = sum(map(Fraction, values))
    assert abs(Fraction(high, 2**20) + Fraction(low, 2**74) - exact) <= Fraction(len(values), 2**75)
    mean = limbs.value(torch.tensor([[high], [low]]), 1 / len(values), torch.empty(1, dtype=torch.float64)).item()
    assert mean == pytest.approx(float(exact / len(values)), rel=1e-15, abs=2.0**-70)


def test_many_equal_numbers_do_not_wrap():
    x = 1 / 3
    pairs = {
        summed([[x] * part for part in parts]) for parts in ([5000], [1, 4999], [1667, 1667, 1666], [715] * 6 + [710])
    }
    assert len(pairs) == 1
    ((high, low),) = pairs
    assert Fraction(high, 2**20) + Fraction(low, 2**74) == 5000 * Fraction(round(Fraction(x) * 2**74), 2**74)


def test_long_tensors_are_added_in_pieces():
    x = torch.randn(3 * limbs.CHUNK + 5, generator=torch.Generator().manual_seed(3))
    whole, pieces = (torch.zeros(2, len(x), dtype=torch.int64) for _ in range(2))
    largest = limbs.add(whole, x, 3.0)
    for begin in range(0, len(x), 7001):
        limbs.add(pieces[:, begin : begin + 7001], x[begin : begin + 7001], 3.0)
    assert torch.equal(whole, pieces)
    assert largest.item() == (3.0 * x.double()).abs().max().item()


# ------------------------------------------------------------------------------------------------------------ updates


def train(run, updates):
    for update in itertools.islice(vbs.updates(run.sampler, run.optimizer), updates):
        for indices in update:
            run.optimizer.backward(run.loss(indices))
            run.optimizer.step()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_number_out_of_range_makes_the_whole_gradient_nan(value):
    def gradients(backend):
        run = training(vbs.ConstantOptimizer, (12,), backend=backend, sampling=EXACT)
        seen = []
        run.optimizer.register_step_pre_hook(lambda *_: seen.extend(one.grad for one in run.model.parameters()))
        with torch.no_grad():
            run.target[int(run.sampler.batches.order(0)(np.array([11]))[0])] = value  # in the last microbatch
        train(run, 1)
        return all(gradient.isnan().all() for gradient in seen)

    for world in (1, 2, 3, 5, 7):
        assert all(run_ranks(gradients, world))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_in_half_precision_keeps_its_weight(dtype, reproducible):
    model = nn.Linear(1, 1, bias=False)
    sampler = vbs.CustomSampler(301, 301, 1, 0, minibatch_size=512, reproducible=reproducible, max_updates=1)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), sampler)
    before = model.weight.detach().clone()
    for update in vbs.updates(DataLoader(torch.ones(301, 1), batch_sampler=sampler), optimizer):
        for rows in update:
            with torch.autocast("cpu", dtype):
                loss = 256 * model(rows).mean()
            optimizer.backward(loss)
            optimizer.step()
    assert (before - model.weight).item() == pytest.approx(256, rel=1e-6)


def test_microbatches_of_two_samplers_in_turns_are_refused():
    optimizers, losses = [], []
    for _ in range(2):
        model = nn.Sequential(nn.Dropout(), nn.Linear(2, 1))
        sampler = vbs.CustomSampler(64, 12, 1, 0, minibatch_size=4, **EXACT)
        optimizers.append(vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler))
        losses.append(lambda rows, model=model: model(rows).square().mean())
    rows = torch.ones(64, 2)
    loops = [vbs.updates(DataLoader(rows, batch_sampler=one.sampler), one) for one in optimizers]
    for updates in zip(*loops, strict=True):
        for optimizer, loss, update in zip(optimizers, losses, updates, strict=True):  # one after the other
            for microbatch in update:
                optimizer.backward(loss(microbatch))
                optimizer.step()
    turns = zip(*(next(iter(loop)) for loop in loops), strict=True)
    first, _ = next(turns)
    optimizers[0].backward(losses[0](first))
    with pytest.raises(RuntimeError, match=r"or after another microbatch was read, .*; call step"):
        optimizers[0].step()


# ------------------------------------------------------------------------------------------------- several optimizers


@pytest.mark.parametrize("dropped", [False, True])
def test_a_backward_whose_gradient_was_dropped_has_met_no_weights(dropped):
    """A later one of the plain loop meets those that another optimizer has left."""
    models = [nn.Linear(2, 1) for _ in range(2)]
    sampler = vbs.CustomSampler(64, "0:4 1:12", 1, 0, minibatch_size=4, **EXACT)
    a, b = (vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler) for model in models)
    (rows,) = next(iter(vbs.updates(DataLoader(torch.ones(64, 2), batch_sampler=sampler), a)))
    a.backward(models[0](rows).mean())
    b.backward(models[1](rows).mean())
    a.step()
    if dropped:
        b.zero_grad()
        models[1](rows).mean().backward()
    with pytest.raises(RuntimeError, match="microbatches that meet the same weights, ") if dropped else nullcontext():
        b.step()


def train_gan(backend, form, rows):
    """Train both models in a form of loop, and return the hash of both."""
    gan, world, ends = Gan(), backend.world, {"max_updates": 9, "on_end": "cycle"}
    of_g, of_d = (vbs.CustomSampler(40, SIZES[:5], world.size, world.rank, rows, **ends, **EXACT) for _ in range(2))
    of_d = of_d if form == "samplers" else of_g
    g, d = (
        vbs.RootRuleOptimizer(torch.optim.Adam(model.parameters()), sampler, 16, backend=backend)
        for model, sampler in ((gan.generator, of_g), (gan.discriminator, of_d))
    )

    def backward_g(indices):
        g.backward(gan.loss_g(indices), inputs=list(gan.generator.parameters()))

    def backward_d(indices, *, raw=False):
        loss = gan.loss_d(indices)
        loss.backward() if raw else d.backward(loss)

    while not d.done:
        if form == "samplers":
            for critics, generators in zip(vbs.updates(of_d, d), vbs.updates(of_g, g), strict=True):
                for indices in critics:
                    backward_d(indices)
                    d.step()
                for indices in generators:
                    backward_g(indices)
                    g.step()
        else:
            for update in vbs.updates(of_g, g):
                for indices in update:
                    backward_g(indices)
                    if form == "backwards first":
                        backward_d(indices)
                        g.step()
                    else:
                        g.step()
                        backward_d(indices, raw=form == "raw")
                    d.step()
    return vbs.weights_hash(nn.ModuleList([gan.generator, gan.discriminator]))


@pytest.mark.parametrize(("form", "rows"), [("backwards first", 4), ("samplers", 4), ("turns", 50), ("raw", 50)])
def test_two_optimizers_make_the_same_updates_to_the_last_bit(form, rows):
    hashes = {one for world in (1, 2, 3) for one in run_ranks(lambda own: train_gan(own, form, rows), world)}
    assert len(hashes) == 1


@pytest.mark.parametrize("form", ["turns", "raw"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_turns_within_an_update_of_several_microbatches_are_refused(form, world):
    """The last microbatch of a rank would meet weights that those of other ranks have not met."""
    with pytest.raises(RuntimeError, match=r"another optimizer has made update 0; call optimizer\.backward"):
        run_ranks(lambda backend: train_gan(backend, form, 4), world)


# ------------------------------------------------------------------------------------------------------ random numbers


class Noisy(Dataset[Tensor]):
    """Draws from all generators for each sample."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow("starts workers"))])
def test_random_numbers_go_by_sample_and_by_microbatch(workers):
    """In any world and worker, in later epochs of persistent workers, too; those between updates are the user's."""

    def drawn(world, rank):
        dataset = vbs.Seeded[Tensor](Noisy())
        sampler = vbs.CustomSampler(dataset, [7, 12, 3], world, rank, 4, on_end="cycle", reproducible=True)
        persists = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers, **persists)
        weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        backend = vbs.backend.LocalBackend()
        samples, forwards, between = {}, {}, []
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        if world > 1:  # one rank of several, whose optimizer is not needed
            for epoch in range(2):
                sampler.set_epoch(epoch)
                for rows in loader:
                    samples |= {(epoch, int(row[0])): tuple(row[1:].tolist()) for row in rows}
                while not sampler.batches.ends_epoch(sampler.position) or sampler.position.epoch < epoch:
                    sampler.advance()
            return samples, {}, []
        optimizer = vbs.ConstantOptimizer(torch.optim.SGD([weight], lr=0.1), sampler, backend=backend)
        for _ in range(2):
            epoch = optimizer.epoch
            for update in vbs.updates(loader, optimizer):
                for rows in update:
                    numbers = (torch.rand(()).item(), np.random.rand(), random.random())
                    forwards[epoch, int(rows[0, 0])] = numbers
                    samples |= {(epoch, int(row[0])): tuple(row[1:].tolist()) for row in rows}
                    optimizer.backward(weight * rows[:, 1].mean())
                    optimizer.step()
                between.append(random.random())
        return samples, forwards, between

    samples, forwards, between = drawn(1, 0)
    again, same, _ = drawn(1, 0)
    assert (samples, forwards) == (again, same)
    assert len(samples) == 60
    assert len({*samples.values()}) == 60
    assert len({*forwards.values()}) == len(forwards)
    generator = random.Random(1)
    assert between == [generator.random() for _ in between]
    others = drawn(2, 0)[0] | drawn(2, 1)[0]
    assert others == samples


# ------------------------------------------------------------------------------------------------------------ refusals


def test_what_must_be_the_same_is_compared_at_a_restore():
    run = training(sampling=EXACT)
    train(run, 3)
    state = run.optimizer.state_dict()
    with pytest.raises(
        ValueError, match=r"saved, but reproducible was 'minibatch_size=4, torch\.set_num_threads\(\d+\)' and is ''"
    ):
        training().optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match=r"and is 'minibatch_size=5, torch\.set_num_threads"):
        training(sampling=EXACT, minibatch_size=5).optimizer.load_state_dict(state)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(ValueError, match=rf"and is 'minibatch_size=4, torch\.set_num_threads\({threads + 1}\)'"):
            training(sampling=EXACT).optimizer.load_state_dict(state)
    finally:
        torch.set_num_threads(threads)
    training(sampling=EXACT).optimizer.load_state_dict(state)


def test_what_requires_gradients_may_change_within_an_update():
    def weights(reproducible):
        run = training(vbs.ConstantOptimizer, (12,), sampling={"reproducible": reproducible})
        layers = run.model[0], run.model[2]
        for update in vbs.updates(run.sampler, run.optimizer):
            for number, indices in enumerate(update):
                layers[0].requires_grad_(number != 1)
                layers[1].requires_grad_(number != 0)
                run.optimizer.backward(run.loss(indices))
                layers[1].weight.requires_grad_(False)
                run.optimizer.step()
            break
        return run.weights()

    assert_equal(weights(True), weights(False))


def test_the_generators_are_the_users_between_updates_whatever_ends_a_loop():
    run, expected = training(sampling=EXACT), random.Random(4)
    random.seed(4)
    for _ in range(2):
        for update in vbs.updates(run.sampler, run.optimizer):
            for indices in update:
                assert random.random() != expected.random()
                expected.seed(4)
                run.optimizer.backward(run.loss(indices))
                run.optimizer.step()
            break
        assert random.getstate() == expected.getstate()
    kept = next(iter(vbs.updates(run.sampler, run.optimizer)))
    next(iter(kept))
    run.optimizer.discard_step()
    assert random.getstate() == expected.getstate()
    expected.random(), random.random()
    del kept  # which must not turn them back
    assert random.getstate() == expected.getstate()


def test_a_compiled_model_has_the_hash_of_the_model():
    model = nn.Linear(2, 3)
    assert vbs.weights_hash(torch.compile(model)) == vbs.weights_hash(model)


def test_microbatches_are_read_in_their_turn():
    run = training(sampling=EXACT)
    update = next(iter(vbs.updates(run.sampler, run.optimizer)))
    for indices in list(update):
        run.optimizer.backward(run.loss(indices))
        with pytest.raises(RuntimeError, match=r"or after another microbatch was read, as by list\(update\)"):
            run.optimizer.step()
        break


def test_what_cannot_be_reproduced_is_refused():
    run = training(sampling=EXACT)
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices))
        with pytest.raises(RuntimeError, match=r"step\(\) was called outside of vbs\.updates"):
            run.optimizer.step()
        break
    run = training(sampling=EXACT, reduction="sum")
    with pytest.raises(ValueError, match=r"the count 'rows' must be a whole number, whose sum has no order, got 0\.5"):
        next(iter(vbs.updates(run.sampler, run.optimizer, counts=lambda _: {"rows": 0.5})))
