"""Streams: each update takes its rows in one order, in any world, and a training resumes in any other."""

import copy
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.streams import Training, expected_rows, in_order, streams_of, train_whole

PASSES = 2


@given(st.integers(0, 10**6), st.lists(st.integers(1, 4), min_size=1, max_size=4))
@examples(100)
def test_updates_take_the_same_rows_in_any_world_and_resume_in_any_other(seed, worlds):
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 5, 40, rng.randrange(100)]) for _ in range(rng.randint(1, 5))]
    sizes, tokens = [rng.choice([1, 3, 20, 64]) for _ in range(2000)], rng.random() < 0.3
    trace = iter(sizes)
    expected = [rows for _ in range(PASSES) for rows in expected_rows(lengths, trace, tokens=tokens)]
    stops = sorted(rng.randint(0, len(expected)) for _ in worlds[1:])
    state, found = None, []

    def part(backend, until):
        run = Training(backend, sizes, streams_of(lengths, seed), tokens=tokens)
        used = []
        if state is not None:
            run.load(copy.deepcopy(state))
        while run.updates.passes < PASSES and run.optimizer.updates < until:
            used += run.run(until)
        return used, run.state(), [parameter.item() for parameter in run.model.parameters()]

    for world, until in zip(worlds, [*stops, math.inf], strict=True):
        ranks = vbs.testing.run_ranks(lambda backend, until=until: part(backend, until), world)
        found += in_order([used for used, *_ in ranks], len(lengths))
        states = [one["stream"] for _, one, _ in ranks]
        assert all(one == states[0] for one in states)
        state = ranks[-1][1]
    assert found == expected
    for *_, weights in ranks:
        assert weights == pytest.approx(train_whole(expected, tokens=tokens), rel=1e-12, abs=1e-14)
