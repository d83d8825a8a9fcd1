"""`equal_rounds=True` raises exactly where a rank would replay or compute another number of microbatches."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import training
from helpers.runs import error_of, minibatch_sizes, samplings, worlds
from helpers.splitting import split_sizes
from variable_batch_size.data.plan.equal_rounds import next_equal
from variable_batch_size.testing import run_ranks
from variable_batch_size.world import World


def is_equal(batch_size, minibatch_size, world, fixed_shape, multiple_of):
    sizes = split_sizes(batch_size, minibatch_size, fixed_shape, multiple_of)
    shares = {len(sizes[rank::world]) for rank in range(world)}
    return len(shares) == 1 and shares != {0}


@given(st.integers(1, 300), minibatch_sizes, worlds, st.booleans(), st.booleans())
@examples(200)
def test_the_next_equal_batch_size_is_the_smallest(batch_size, minibatch_size, world, fixed_shape, spread):
    multiple_of = world if spread and not fixed_shape else 1
    found = next_equal(batch_size, minibatch_size, world, fixed_shape=fixed_shape, multiple_of=multiple_of)
    expected = batch_size
    while not is_equal(expected, minibatch_size, world, fixed_shape, multiple_of):
        expected += 1
    assert found == expected


MESSAGE = (
    r"^equal_rounds=True needs .*, and no replay, but step (\d+) has a batch size of (\d+), cut into (\d+) "
    r"microbatch(?:es)?, on (\d+) ranks with minibatch_size=(\d+); (.*)$"
)
REST = r"pass drop_last=True, because the step is the rest of epoch \d+"
LAST = r"change max_samples=\d+, which shortens the step"
TOO_LARGE = r"pass a smaller minibatch_size, because (\d+), the next one without replays, exceeds the dataset"
LARGER = r"choose a batch size of (\d+), the next one without replays(?: \((\d+) if the noise is measured\))?"


@given(samplings(), worlds, st.booleans(), st.data())
@examples(200)
def test_a_step_without_equal_rounds_raises_when_its_epoch_is_read(case, size, spread, data):
    number = data.draw(st.integers(0, case.epochs - 1))
    m, fixed = case.minibatch_size, case.fixed_shape
    cut = {"multiple_of": 1 if fixed else size}  # when the sampler is created; an optimizer may change it

    def read():
        sampler = case.sampler(World(data.draw(st.integers(0, size - 1)), size), equal_rounds=True)
        cut["multiple_of"] = size if spread and not fixed else 1
        sampler.attach(spread=spread)
        if number:
            sampler.set_epoch(number)
        rounds = [len(list(sampler))]
        assert rounds == [sum(len(sizes_of(update)) // size for update in case.updates[number])]

    def sizes_of(update):
        return split_sizes(update.batch_size, m, fixed, cut["multiple_of"])

    error = error_of(read)
    uneven = [
        update
        for epoch in case.updates
        for update in epoch
        if not is_equal(update.batch_size, m, size, fixed, cut["multiple_of"])
    ]
    assert (error is not None) == any(update.epoch == number for update in uneven)
    if error is not None:
        found = re.match(MESSAGE, error)
        assert found is not None
        step, batch_size, count, ranks, rows = map(int, found.groups()[:5])
        named = next(update for update in uneven if update.step == step)
        assert named.epoch == number or case.trace.constant_until(0) is None
        assert named == next(update for update in uneven if update.epoch == named.epoch)
        assert (batch_size, count, ranks, rows) == (named.batch_size, len(sizes_of(named)), size, m)
        assert ("1 microbatch, " in error) == (count == 1)
        enough, measured = (
            next_equal(batch_size, m, size, fixed_shape=fixed, multiple_of=multiple_of)
            for multiple_of in (cut["multiple_of"], 1)
        )
        shortened = batch_size < case.trace.batch_size(step)
        rest = named.start + batch_size == case.dataset_size
        remedy = (REST if rest else LAST) if shortened else TOO_LARGE if enough > case.dataset_size else LARGER
        numbers = re.fullmatch(remedy, found[6])
        assert numbers is not None
        if not shortened:
            differs = remedy == LARGER and enough < measured <= case.dataset_size
            assert numbers.groups() == (str(enough), str(measured) if differs else None)[: len(numbers.groups())]


@given(st.integers(1, 40), st.integers(1, 6), st.sampled_from([2, 3, 4]), st.booleans())
@examples(60)
def test_the_proposed_batch_size_has_equal_rounds(batch_size, minibatch_size, size, measured):
    """Whether a rule measures the noise is not known when the sampler raises."""
    kind = vbs.AdaScaleOptimizer if measured else vbs.ConstantOptimizer

    def train(backend):
        def read(batch_size):
            sampler = vbs.CustomSampler(
                1000 * batch_size, batch_size, size, backend.world.rank, minibatch_size, equal_rounds=True
            )
            kind(torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.1), sampler, batch_size, backend=backend)
            next(iter(sampler))

        error, proposed = error_of(lambda: read(batch_size)), batch_size
        if error is not None:
            found = re.search(LARGER, error)
            assert found is not None
            proposed = int(found[2] if measured and found[2] else found[1])
            read(proposed)
        return proposed

    assert run_ranks(train, size)[0] >= batch_size


def test_a_constant_trace_raises_at_once():
    vbs.CustomSampler(10, 4, 2, 0, 2, equal_rounds=True)
    with pytest.raises(
        ValueError,
        match=r"but step 2 has a batch size of 1, cut into 1 microbatch, on 2 ranks with minibatch_size=2; pass "
        r"drop_last=True, because the step is the rest of epoch 0$",
    ):
        vbs.CustomSampler(9, 4, 2, 0, 2, equal_rounds=True)
    sampler = vbs.CustomSampler(9, 4, 2, 0, 2, equal_rounds=True, drop_last=True)
    assert len(list(sampler)) == 2
    with pytest.raises(ValueError, match=r"step 0 has a batch size of 6, cut into 3 microbatches, .* size of 7, "):
        vbs.CustomSampler(12, 6, 2, 0, 2, equal_rounds=True).attach(spread=False)


def test_an_optimizer_may_need_equal_rounds():
    sampler = vbs.CustomSampler(20, [8, 3, 9], 4, 1, 2)
    sampler.attach(equal_rounds=True)
    sampler.attach()
    assert sampler.batches.split.equal_rounds
    with pytest.raises(ValueError, match="step 1 has a batch size of 3, cut into 3 microbatches, on 4 ranks"):
        next(iter(sampler))
    with pytest.raises(ValueError, match="step 0 has a batch size of 3, "):
        vbs.CustomSampler(20, 3, 4, 1, 2).attach(equal_rounds=True)


def test_a_past_with_fewer_ranks_does_not_matter():
    """A training on four ranks goes on on eight, which have no equal rounds in the updates that were made."""
    trace = vbs.BatchTrace.parse("0:4 3:8")

    def train(backend):
        run = training(vbs.ConstantOptimizer, [1], backend=backend)
        world = backend.world
        sampler = vbs.CustomSampler(36, trace, world.size, world.rank, 4, equal_rounds=True)
        run.optimizer = vbs.ConstantOptimizer(run.optimizer.inner, sampler, backend=backend)
        run.sampler = sampler
        if world.size == 4:
            return run.run(3).optimizer.state_dict()
        with pytest.raises(ValueError, match="step 0 has a batch size of 4, "):
            next(iter(sampler))
        run.optimizer.load_state_dict(saved[0])
        return run.run(3).optimizer.state_dict()

    saved = run_ranks(train, 4)
    assert run_ranks(train, 8)[0]["vbs"]["sampler"]["samples"] == 36


def test_a_chosen_batch_size_without_equal_rounds_raises_when_it_is_dealt():
    def train(backend):
        trace = vbs.AdaptiveTrace(lambda input: 8 if input.updates < 12 else 3, start=8, every=4, delay=4)
        world = backend.world
        sampler = vbs.CustomSampler(1000, trace, world.size, world.rank, 4, equal_rounds=True)
        weight = torch.nn.Parameter(torch.zeros(()))
        optimizer = vbs.ConstantOptimizer(torch.optim.SGD([weight], lr=0.0), sampler, backend=backend)

        def loop():
            for _ in sampler:
                weight.backward()
                optimizer.step()

        with pytest.raises(ValueError, match=r"step 16 has a batch size of 3, cut into 3 .* on 4 ranks .* size of 4, "):
            loop()
        return optimizer.updates

    assert run_ranks(train, 4) == [16] * 4


def test_ranks_must_agree_on_equal_rounds():
    def train(backend):
        sampling = {"equal_rounds": backend.world.rank == 1}
        run = training(vbs.ConstantOptimizer, [20], backend=backend, minibatch_size=8, sampling=sampling)
        return error_of(lambda: run.run(1)) or ""

    for message in run_ranks(train, 2):
        assert "the same equal_rounds, but it is False on rank 0 and True on rank 1; pass" in message
