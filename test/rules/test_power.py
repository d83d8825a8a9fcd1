"""`PowerRule`: the linear and the root rule are cases of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples

updates = st.builds(
    vbs.rules.RuleInput,
    batch_size=st.integers(1, 2**40),
    ref_batchsize=st.integers(1, 2**40),
    updates=st.integers(0, 1000),
)


@examples(200)
@given(update=updates)
def test_one_is_the_linear_rule_and_a_half_the_root_rule(update: vbs.rules.RuleInput) -> None:
    assert vbs.rules.PowerRule(1)(update) == vbs.rules.LinearRule()(update)
    assert vbs.rules.PowerRule(0.5)(update) == vbs.rules.RootRule()(update)


@examples(100)
@given(first=st.integers(1, 10**6), second=st.integers(1, 10**6), exponent=st.floats(0, 2))
def test_the_exponent_is_that_of_two_tuned_learning_rates(first: int, second: int, exponent: float) -> None:
    lr = vbs.rules.PowerRule(exponent)(vbs.rules.RuleInput(second, first)).lr
    if first != second:
        assert math.log(lr) / math.log(second / first) == pytest.approx(exponent, abs=1e-6)
