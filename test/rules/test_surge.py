"""`SurgeRule`: the ratio of two values of the paper's equation, on the host and as tensors of a device."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import training

sizes = st.integers(1, 2**30)


def best_lr(batch_size, noise_scale):
    """Li et al. 2024, equation 13, over its maximum."""
    return 2 / ((noise_scale / batch_size) ** 0.5 + (batch_size / noise_scale) ** 0.5)


def tensors(noise):
    return vbs.rules.Noise(*(torch.tensor(float(number), dtype=torch.float64) for number in astuple(noise)))


@examples(200)
@given(batch_size=sizes, ref_batchsize=sizes, noise_scale=st.floats(1e-3, 1e12))
def test_a_given_noise_scale_is_that_of_the_equation(batch_size, ref_batchsize, noise_scale):
    rule, update = vbs.rules.SurgeRule(noise_scale), vbs.rules.RuleInput(batch_size, ref_batchsize)
    assert rule(update).lr == pytest.approx(best_lr(batch_size, noise_scale) / best_lr(ref_batchsize, noise_scale))
    assert not rule.needs_noise
    measured = vbs.rules.RuleInput(
        batch_size, ref_batchsize, noise=vbs.rules.Noise(noise_scale, 1.0, rule(update).progress, 1)
    )
    assert vbs.rules.SurgeRule()(measured) == rule(update)


@examples(50)
@given(noise_scale=st.integers(1, 10**6), ref_batchsize=st.integers(1, 10**6), other=st.integers(1, 10**7))
def test_the_factor_is_largest_at_the_noise_scale(noise_scale, ref_batchsize, other):
    rule = vbs.rules.SurgeRule(noise_scale)
    peak, beside = (rule(vbs.rules.RuleInput(size, ref_batchsize)).lr for size in (noise_scale, other))
    assert peak >= beside * (1 - 1e-12)


@examples(100)
@given(
    batch_size=sizes,
    ref_batchsize=sizes,
    parts=st.sampled_from([(0.0, 1.0), (1.0, 0.0), (1.0, -0.5), (math.nan, math.nan), (3.0, 0.01)]),
)
def test_the_factor_is_finite_and_the_same_as_a_tensor(batch_size, ref_batchsize, parts):
    k, (sigma2, mu2) = batch_size / ref_batchsize, parts
    known = not math.isnan(sigma2)
    gain = vbs.rules.adascale_gain(sigma2, max(mu2, 0.0), batch_size, ref_batchsize) if known else min(1.0, k)
    noise = vbs.rules.Noise(sigma2, mu2, gain, int(known))
    found = vbs.rules.SurgeRule()(vbs.rules.RuleInput(batch_size, ref_batchsize, noise=noise))
    expected = {(0.0, 1.0): k**-0.5, (1.0, 0.0): k**0.5, (1.0, -0.5): k**0.5, (3.0, 0.01): found.lr}
    assert found.lr == pytest.approx(expected[parts] if known else min(1, k) ** 0.5)
    on_device = vbs.rules.SurgeRule()(vbs.rules.RuleInput(batch_size, ref_batchsize, noise=tensors(noise)))
    assert isinstance(on_device.lr, torch.Tensor)
    assert on_device.lr.shape == ()
    assert (on_device.lr.item(), on_device.progress.item()) == pytest.approx((found.lr, found.progress), rel=1e-15)


def test_a_given_noise_scale_measures_nothing():
    measured, given_one = (training(vbs.CustomOptimizer, rule=rule) for rule in ("surge", vbs.rules.SurgeRule(100.0)))
    assert measured.run(2).optimizer.noise().updates == 2
    with pytest.raises(RuntimeError, match="noise"):
        given_one.run(2).optimizer.noise()
