"""Throughput.fit: parameters from measured updates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.properties import examples
from variable_batch_size.adaptive import Throughput

DEVICES, ROWS, ROUNDS = (1, 2, 3, 4, 8, 16), (8, 16, 64, 256), (1, 2, 4)
MODELS = st.builds(
    Throughput,
    accum_base=st.floats(0.005, 0.1),
    accum_row=st.floats(1e-4, 1e-2),
    net_base=st.floats(0.02, 0.3),
    net_device=st.floats(0.002, 0.02),
    overlap=st.floats(1, 4),
)


def grid(devices=DEVICES, rows=ROWS):
    return np.array(np.meshgrid(devices, rows, ROUNDS)).reshape(3, -1).astype(np.float64)  # (3, updates)


def measure(model, noise=0.0, **where):
    devices, rows, rounds = grid(**where)
    factors = np.random.default_rng(0).lognormal(0, noise, len(rows))
    return np.stack([devices, rows, rounds, model.of_rounds(rounds * rows, rows, rounds, devices) * factors], axis=1)


@examples(40)
@given(MODELS)
def test_exact_measurements_give_the_parameters(model):
    found = Throughput.fit(measure(model))
    assert found.error(measure(model)) < 1e-6
    for name in ("accum_base", "accum_row", "net_base", "net_device", "overlap"):
        assert getattr(found, name) == pytest.approx(getattr(model, name), rel=1e-3)


@examples(40)
@given(MODELS)
def test_predictions_from_noisy_measurements(model):
    measured = measure(model, noise=0.05, devices=(1, 2, 4, 8))
    found = Throughput.fit(measured)
    assert 0.03 < found.error(measured) < 0.07
    assert found.error(measure(model)) < 0.06  # also of 3 and of 16 devices


@given(MODELS)
def test_one_device_has_no_communication(model):
    found = Throughput.fit(measure(model, devices=(1,)))
    assert (found.net_base, found.net_device, found.overlap) == (0, 0, 1)
    assert found.error(measure(model, devices=(1,))) < 1e-9


@given(MODELS, st.integers(2, 64))
def test_rounds_tell_the_communication_of_one_number_of_devices(model, devices):
    """It comes once an update. With overlap a part of it is hidden, the more the longer a microbatch takes."""
    without_overlap = dataclasses.replace(model, overlap=1)
    found = Throughput.fit(measure(without_overlap, devices=(devices,)))
    assert found.net_base == pytest.approx(model.net_base + model.net_device * (devices - 2), rel=1e-6)
    assert (found.net_device, found.overlap) == (0, 1)
    assert found.error(measure(without_overlap, devices=(devices,))) < 1e-9
    hidden = Throughput.fit(measure(model, devices=(devices,)))
    assert hidden.net_base <= found.net_base * (1 + 1e-9)
    assert hidden.error(measure(model, devices=(devices,))) < 0.25


@given(MODELS)
def test_communication_needs_two_numbers_of_rounds(model):
    """Otherwise it is a part of what a microbatch costs."""
    measured = measure(model, devices=(4,))
    one = measured[measured[:, 2] == 2]
    assert Throughput.fit(one).net_base == 0


@pytest.mark.parametrize("updates", [1, 2, 3, 4])
def test_few_updates(updates):
    model = Throughput(0.02, 0.001, 0.1, 0.01, 2.0)
    measured = measure(model, devices=(2, 1, 4), rows=(32,))[[0, 4, 6, 1][:updates]]
    found = Throughput.fit(measured)
    assert found.error(measured) < 0.02
    assert found.accum_base == 0  # all microbatches have equally many rows


@pytest.mark.slow("fits many models")
@given(MODELS, st.sampled_from([(1, 2), (1, 4), (2, 4)]))
def test_overlap_that_cannot_be_told_is_1(model, devices):
    """With one microbatch of one size for each number of devices, any overlap fits."""
    each = np.array(devices, np.float64)
    rows, rounds = np.full(2, 32.0), np.ones(2)
    measured = np.stack([each, rows, rounds, model.of_rounds(rows, rows, rounds, each)], axis=1)
    found = Throughput.fit(measured)
    assert found.overlap == 1
    assert found.error(measured) < 1e-6
