"""Batches in tokens that resume with another trace or end: they take the samples that are left, or say why not."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from variable_batch_size.world import World

pytestmark = pytest.mark.filterwarnings(
    "ignore:With lengths= batch sizes are in tokens", "ignore:The batch trace differs"
)
lengths = st.lists(st.integers(1, 12), min_size=2, max_size=60)
LEFT = "the rest of an epoch must have a sample for each of its updates"


def sampler(numbers, trace, world=World(), **options):  # noqa: B008 (a value)
    options = {"max_tokens": 20, "on_end": "hold", "lengths": numbers} | options
    return vbs.CustomSampler(len(numbers), trace, world.size, world.rank, **options)


def advance(one, updates):
    """Make so many updates of the epoch, or all; return their samples."""
    taken = []
    for _ in range(updates):
        due = one.batches.next_update(one.position)
        if due.epoch or one.batches.ends_epoch(due):
            break
        taken += [int(row) for rows in one.batches.parts(*due) for row in rows]
        one.advance()
    return taken


@given(lengths, st.data(), st.booleans(), st.integers(1, 3), st.integers(1, 3))
@examples(200)
def test_another_future_takes_the_samples_that_are_left(numbers, data, small, before, after):
    least = 1 if small else 2 * max(numbers)
    assume(sum(numbers) >= least)
    sizes = st.lists(st.integers(least, sum(numbers)), min_size=1, max_size=9)
    past, first, second = (data.draw(sizes) for _ in range(3))
    try:
        one = sampler(numbers, past + first, World(0, before))
        taken = advance(one, len(past))
    except ValueError:
        assert small
        return
    assume(one.position.step == len(past))
    other = sampler(numbers, past + second, World(after - 1, after))
    try:
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        taken += advance(other, 10**6)
    except ValueError as error:
        if not small or not any(text in str(error) for text in (LEFT, "needs as many samples that count")):
            raise
        return
    assert sorted(taken) == [*range(len(numbers))]


@given(lengths, st.data(), st.sampled_from(["max_samples", "max_updates"]))
@examples(100)
def test_a_later_end_goes_on_where_an_earlier_one_was(numbers, data, name):
    assume(sum(numbers) >= 2 * max(numbers))
    trace = data.draw(st.lists(st.integers(2 * max(numbers), sum(numbers)), min_size=1, max_size=9))
    end = data.draw(st.integers(1, sum(numbers) if name == "max_samples" else len(trace)))
    one = sampler(numbers, trace, **{name: end})
    taken = advance(one, 10**6)
    assert one.samples == sum(numbers[row] for row in taken)
    if name == "max_samples":
        assert abs(one.samples - end) <= max(numbers)
    other = sampler(numbers, trace)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    taken += advance(other, 10**6)
    assert sorted(taken) == [*range(len(numbers))]
    assert other.samples == sum(numbers)


@given(lengths, st.data(), st.integers(1, 3))
@examples(60)
def test_without_the_last_part_each_sample_comes_at_most_once(numbers, data, ranks):
    assume(sum(numbers) >= 2 * max(numbers))
    trace = data.draw(st.lists(st.integers(2 * max(numbers), sum(numbers)), min_size=1, max_size=9))
    options = {"drop_last": True}
    alone = advance(sampler(numbers, trace, **options), 10**6)
    assert len({*alone}) == len(alone)
    dealt = []
    for rank in range(ranks):
        one = sampler(numbers, trace, World(rank, ranks), **options)
        rows = iter(list(one))
        for step in itertools.count():
            if step == one.plan.epoch(0).end_step:
                break
            position = type(one.position)(0, step)
            for microbatch in one.batches.batch(position).microbatches:
                found = next(rows)
                dealt += found if microbatch.samples else []
    assert sorted(dealt) == sorted(alone)


def test_rows_and_tokens_are_two_units():
    numbers = [3, 5, 2, 7] * 10
    options = {"epochs": 1, "max_tokens": 10}
    weight = torch.zeros(1, requires_grad=True)
    tokens, rows = sampler(numbers, 20, **options), vbs.CustomSampler(40, 8, 1, 0, epochs=1)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD([weight], lr=0.1), tokens, 20)
    for update in vbs.updates(tokens, optimizer):
        for _ in update:
            optimizer.backward(weight.sum())
            optimizer.step()
    with pytest.raises(ValueError, match="must count its batches in one unit, got samples after tokens; pass lengths="):
        optimizer.continue_with(rows)
    with pytest.raises(ValueError, match="dataset_size was 170 and is 40"):
        rows.load_state_dict(tokens.state_dict())
    assert not sampler(numbers, 20, counts=[1] * 40).batches.in_tokens
    state = vbs.CustomSampler(40, 8, 1, 0).state_dict()
    other = sampler(numbers, 8)
    other.load_state_dict(state, strict=False)
    assert other.position == (0, 0)
