"""Batches in tokens with all arguments at once: what ranks are dealt, update by update, and the rest after a resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples

pytestmark = pytest.mark.filterwarnings("ignore:With lengths= batch sizes are in tokens")
EPOCHS = 3


@st.composite
def cases(draw):
    """Lengths, counts, a trace whose sizes are at least twice the largest count, and further arguments."""
    lengths = draw(st.lists(st.integers(1, draw(st.sampled_from([1, 6, 25]))), min_size=1, max_size=50))
    counts = [draw(st.sampled_from([0, length, length // 2])) if draw(st.booleans()) else length for length in lengths]
    assume(any(counts))
    least = min(sum(counts), 2 * max(counts))
    trace = draw(st.lists(st.integers(least, sum(counts)), min_size=1, max_size=8))
    options: dict[str, Any] = {"lengths": lengths, "counts": counts, "seed": draw(st.integers(0, 3)), "epochs": EPOCHS}
    options |= {name: draw(st.booleans()) for name in ("shuffle", "drop_last", "pad", "reproducible")}
    options["max_tokens"] = max(lengths) + draw(st.sampled_from([0, 5, 60]))
    options["on_end"] = draw(st.sampled_from(["hold", "cycle", "stop"]))
    options["max_updates"] = draw(st.none() | st.integers(1, 12))
    options["max_samples"] = draw(st.none() | st.integers(1, 3 * sum(counts)))
    return trace, options


def ranks_of(trace, options, number, *, padded):
    found = [vbs.CustomSampler(len(options["lengths"]), trace, number, rank, **options) for rank in range(number)]
    for sampler in found:
        sampler.attach(None, padded=padded)
    return found


def check_update(batches, rows, options):
    """Return the samples of an update, of whose microbatches each rank has been dealt its rows."""
    lengths, counts = options["lengths"], options["counts"]
    parts: dict[int, list[int]] = {}
    counted: dict[int, int] = {}
    for batch, of_rank in zip(batches, rows, strict=True):
        for microbatch in batch.microbatches:
            taken = next(of_rank)
            longest = max(lengths[row] for row in taken)
            held = len(taken) * longest if options["pad"] else sum(lengths[row] for row in taken)
            assert held <= options["max_tokens"]
            assert microbatch.samples in (0, sum(counts[row] for row in taken))
            assert parts.setdefault(microbatch.number, taken) == taken
            counted[microbatch.number] = counted.get(microbatch.number, 0) + microbatch.samples
    samples = [row for taken in parts.values() for row in taken]
    assert {number: sum(counts[row] for row in taken) for number, taken in parts.items()} == counted
    assert {batch.batch_size for batch in batches} == {sum(counted.values())}
    assert len({*samples}) == len(samples)
    return sorted(samples)


def train(samplers, options):
    """Return the samples of each update to the end, and the state before each."""
    made, states = [], []
    for epoch in range(samplers[0].epoch, EPOCHS):
        if samplers[0].done:
            break
        rows = [iter(list(sampler)) for sampler in samplers]
        while (due := samplers[0].batches.next_update(samplers[0].position)).epoch == epoch:
            if samplers[0].batches.ends_epoch(due):
                break
            states.append(copy.deepcopy(samplers[0].state_dict()))
            made.append((epoch, check_update([sampler.batch for sampler in samplers], rows, options)))
            for sampler in samplers:
                sampler.advance()
        assert [next(of_rank, None) for of_rank in rows] == [None] * len(rows)
    return made, states


@given(cases(), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
@examples(40)
def test_ranks_are_dealt_each_sample_once_and_a_resume_deals_the_rest(case, ranks, after, padded, data):
    trace, options = case
    samplers = ranks_of(trace, options, ranks, padded=padded)
    made, states = train(samplers, options)
    assert samplers[0].samples == sum(options["counts"][row] for _, samples in made for row in samples)
    for epoch in range(EPOCHS):
        taken = [row for number, samples in made if number == epoch for row in samples]
        assert len({*taken}) == len(taken)
        if samplers[0].plan.epoch(epoch).complete and not options["drop_last"]:
            assert sorted(taken) == [*range(len(options["lengths"]))]
    stop = data.draw(st.integers(0, len(made) - 1))
    resumed = ranks_of(trace, {**options, "pad": not options["pad"]}, after, padded=not padded)
    for sampler in resumed:
        sampler.load_state_dict(states[stop])
    rest, _ = train(resumed, {**options, "pad": not options["pad"]})
    assert rest == made[stop:]
    assert resumed[0].samples == samplers[0].samples
