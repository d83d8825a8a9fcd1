"""`PowerRule`: the linear and the root rule are cases of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import training

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


@pytest.mark.parametrize("wrong", [-0.5, math.inf, math.nan])
def test_rejects_an_exponent_that_is_negative_or_not_finite(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"^exponent must be a finite number >= 0, got .*; pass 1 for the linear rule"):
        vbs.rules.PowerRule(wrong)


def test_its_name_alone_is_not_enough() -> None:
    with pytest.raises(ValueError, match=r"PowerRule takes some; pass rule=vbs\.rules\.PowerRule\(\.\.\.\)"):
        training(vbs.CustomOptimizer, rule="power")
    with pytest.raises(TypeError, match=r"^exponent must be a finite number >= 0"):
        vbs.rules.PowerRule("linear")  # type: ignore[arg-type]
