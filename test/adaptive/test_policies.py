"""Controllers that can be named, and the time of an update."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.controllers import Halving
from variable_batch_size.adaptive import (
    ConstantBatch,
    ControlInput,
    Goodput,
    NoiseScale,
    NormTest,
    Seesaw,
    Throughput,
)
from variable_batch_size.adaptive.table import parse_policy
from variable_batch_size.microbatching import cut

SECONDS = st.floats(1e-6, 10)


@given(st.integers(1, 10**6), st.integers(1, 4096))
def test_the_batch_follows_the_devices_or_nothing(samples, devices):
    state = ControlInput(devices)
    assert parse_policy(f"per-device:{samples}")(state) == samples * devices
    assert parse_policy(f"constant:{samples}")(state) == samples
    assert parse_policy(f"constant:{samples}") == ConstantBatch(samples)


@pytest.mark.parametrize(
    ("text", "controller"),
    [
        ("noise-scale:1", NoiseScale()),
        ("noise-scale:0.25", NoiseScale(0.25)),
        ("norm-test:0.5", NormTest(0.5)),
        ("goodput:32-4096", Goodput((32, 4096))),
        ("goodput:32-4k", Goodput((32, 4000))),
        ("constant:60k", ConstantBatch(60_000)),
    ],
)
def test_a_controller_is_named(text, controller):
    assert parse_policy(text) == controller


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.floats(1, 10), st.integers(1, 500), st.integers(1, 9), st.integers(1, 20))
def test_the_time_is_that_of_the_model(base, row, net, device, overlap, rows, rounds, devices):
    accum = base + row * rows
    communication = 0.0 if devices == 1 else net + device * max(devices - 2, 0)
    expected = (rounds - 1) * accum + (accum**overlap + communication**overlap) ** (1 / overlap)
    seconds = Throughput(base, row, net, device, overlap).of_rounds(rounds * rows, rows, rounds, devices)
    assert seconds == pytest.approx(expected, rel=1e-12)
    assert seconds >= rounds * accum * (1 - 1e-12)


@given(st.integers(1, 3000), st.integers(1, 50), st.integers(1, 100), st.booleans(), st.booleans())
def test_the_rows_are_those_of_the_busiest_rank(batch_size, devices, minibatch_size, spread, fixed_shape):
    split = cut(batch_size, minibatch_size, fixed_shape=fixed_shape, multiple_of=devices if spread else 1)
    sizes = [minibatch_size if fixed_shape else split.locate(number)[1] for number in range(split.microbatches)]
    ranks = [sizes[rank::devices] for rank in range(devices)]
    busiest = max(ranks, key=lambda rank: (sum(rank), len(rank)))
    throughput = Throughput(accum_base=1.0, accum_row=0.25)
    seconds = throughput.seconds(batch_size, devices, minibatch_size, spread=spread, fixed_shape=fixed_shape)
    assert seconds == len(busiest) + 0.25 * sum(busiest)
    assert throughput.seconds(batch_size, devices, spread=spread) == throughput.seconds(batch_size, devices)


def test_a_simple_model_is_linear():
    simple = Throughput.simple(samples_per_second=500, communication_seconds=0.25)
    assert simple.seconds(1000, devices=1) == 2
    assert simple.seconds(1000, devices=4) == 0.75
    assert simple.seconds(1001, devices=4) == pytest.approx(251 / 500 + 0.25)


@given(st.integers(0, 10**6), st.integers(1, 5000))
def test_seesaw_lowers_the_learning_rate_by_the_root(samples, batch_size):
    schedule, critical = Halving(10_000, 900_000), 16 * batch_size
    size = Seesaw(schedule, batch_size, critical)(ControlInput(devices=1, samples=samples))
    factor = schedule(samples)
    assert size == (min(batch_size / factor, critical) if factor else critical)
    if size < critical:
        assert factor * math.sqrt(size / batch_size) == pytest.approx(math.sqrt(factor))


def test_a_higher_learning_rate_makes_no_smaller_batch():
    assert Seesaw(lambda samples: 1.5, 64, 128)(ControlInput(devices=1)) == 64


def test_seesaw_is_for_rules_that_take_the_root():
    """In a training; a simulation may measure its progress by any rule."""
    controller = Seesaw(Halving(10_000, 10**6), 8, 64)

    def training(rule):
        sampler = vbs.CustomSampler(100, vbs.AdaptiveTrace(controller, bounds=(8, 64)), 1, 0, 4)
        vbs.CustomOptimizer(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]), sampler, 32, rule=rule)

    for rule in (vbs.rules.RootRule(), vbs.rules.PowerRule(0.5), vbs.rules.RootHalfLifeRule()):
        training(rule)
    for rule in (
        vbs.rules.LinearRule(),
        vbs.rules.PowerRule(0.6),
        vbs.rules.ConstantRule(),
        vbs.rules.AdaScaleRule(),
        vbs.rules.AdamScaleRule(),
    ):
        with pytest.raises(
            ValueError, match=r"^Seesaw needs a rule that multiplies lr by the root of B / ref_batchsize"
        ):
            training(rule)
