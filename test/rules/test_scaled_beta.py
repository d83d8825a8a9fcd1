"""`Scaling.scaled_betas`: 1 - factor * (1 - beta), exact where it becomes 0 or stays, and a power of the second one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.properties import examples
from variable_batch_size.rules.base import Scaling

betas = st.floats(0, 1, exclude_max=True)


def scaled_beta(beta, factor):
    return Scaling(one_minus_beta=factor).scaled_beta(beta)


@examples(200)
@given(thousandths=st.integers(0, 999), reference=st.integers(1, 10**6))
def test_a_beta_that_becomes_zero_is_exactly_zero(thousandths, reference):
    beta = thousandths / 1000
    k = reference * 1000 / (1000 - thousandths) / reference  # 1 / (1 - beta), up to rounding
    assert scaled_beta(beta, k) == 0
    assert scaled_beta(beta, k * (1 + 1e-9)) < 0 < scaled_beta(beta, k * (1 - 1e-9)) < 1
    assert scaled_beta(beta, 1.0) == beta


@examples(200)
@given(pair=st.tuples(betas, betas), factor=st.floats(0.01, 5))
def test_without_a_power_every_beta_is_scaled_alike(pair, factor):
    scaling = Scaling(one_minus_beta=factor)
    assert scaling.scaled_betas(pair) == tuple(map(scaling.scaled_beta, pair))
    assert scaling.scaled_alpha(pair[0]) == scaling.scaled_beta(pair[0])


@examples(200)
@given(pair=st.tuples(betas, st.floats(0, 1 - 1e-6)), batch_size=st.integers(1, 10**6), ref=st.integers(1, 10**6))
def test_a_power_keeps_the_half_life_of_the_second_beta_and_never_leaves_its_range(pair, batch_size, ref):
    first, second = Scaling(beta2_power=batch_size / ref).scaled_betas(pair)
    assert first == pair[0]
    assert 0 <= second < 1
    assert Scaling(beta2_power=batch_size / ref).scaled_alpha(pair[1]) == second
    if pair[1] > 0.01 and second > 1e-300:
        half_life, own = (math.log(0.5) / math.log(beta) for beta in (pair[1], second))  # in updates
        assert own * batch_size == pytest.approx(half_life * ref, rel=1e-3)


def test_the_power_comes_after_the_factor():
    assert Scaling(one_minus_beta=2.0, beta2_power=3.0).scaled_betas((0.75, 0.75, 0.75)) == (0.5, 0.125, 0.5)
    assert Scaling(one_minus_beta=5.0, beta2_power=0.5).scaled_alpha(0.75) == -0.25  # which is refused
