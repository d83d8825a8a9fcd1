"""`Scaling.scaled_beta`: 1 - factor * (1 - beta), exact where it becomes 0 or stays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helpers.reference import examples
from variable_batch_size.rules.base import Scaling


def scaled_beta(beta: float, factor: float) -> float:
    return Scaling(one_minus_beta=factor).scaled_beta(beta)


@examples(200)
@given(thousandths=st.integers(0, 999), reference=st.integers(1, 10**6))
def test_a_beta_that_becomes_zero_is_exactly_zero(thousandths: int, reference: int) -> None:
    beta = thousandths / 1000
    k = reference * 1000 / (1000 - thousandths) / reference  # 1 / (1 - beta), up to rounding
    assert scaled_beta(beta, k) == 0
    assert scaled_beta(beta, k * (1 + 1e-9)) < 0 < scaled_beta(beta, k * (1 - 1e-9)) < 1
    assert scaled_beta(beta, 1.0) == beta
