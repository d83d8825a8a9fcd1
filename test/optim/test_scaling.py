"""A rule's factors on parameter groups: in place during an update, and the user's own objects before and after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.reference import examples
from variable_batch_size.backend import LocalBackend
from variable_batch_size.optim.scaling import Rates, moved_beta, scaled
from variable_batch_size.rules.base import Scaling

BACKEND = LocalBackend()


def inside(groups: list[dict[str, Any]], scaling: Scaling) -> list[dict[str, Any]]:
    """What the groups hold within the block; checks that they are as before when it is over."""
    before = [dict(group) for group in groups]
    with scaled(groups, len(groups) * [scaling], BACKEND):
        found = [dict(group) for group in groups]
    assert all(group[name] is old[name] for group, old in zip(groups, before, strict=True) for name in old)
    return found


@examples(100)
@given(
    lr=st.floats(1e-6, 10),
    decay=st.floats(0, 1),
    betas=st.tuples(st.floats(0.5, 0.999), st.floats(0.5, 0.999)),
    factor=st.floats(0.01, 2),
)
def test_every_hyperparameter_has_its_factor(
    lr: float, decay: float, betas: tuple[float, float], factor: float
) -> None:
    group = {"lr": lr, "weight_decay": decay, "betas": betas, "eps": 1e-8, "momentum": 0.9}
    scaling = Scaling(lr=factor, weight_decay=3 * factor, one_minus_beta=factor, eps=factor / 7)
    assert inside([group], scaling) == [
        {
            "lr": lr * factor,
            "weight_decay": decay * (3 * factor),
            "betas": tuple(pytest.approx(1 - factor * (1 - beta)) for beta in betas),
            "eps": 1e-8 * (factor / 7),
            "momentum": 0.9,
        }
    ]


def test_groups_differ_in_what_they_have() -> None:
    groups = [{"lr": 0.1}, {"lr": 0.2, "weight_decay": 0.5}, {"alpha": 0.99}]
    found = inside(groups, Scaling(lr=2, weight_decay=2, one_minus_beta=2))
    assert found == [{"lr": 0.2}, {"lr": 0.4, "weight_decay": 1.0}, {"alpha": pytest.approx(0.98)}]


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    lr = torch.tensor(0.5)
    (found,) = inside([{"lr": lr}], Scaling(lr=3))
    assert isinstance(found["lr"], torch.Tensor)
    assert (found["lr"].item(), lr.item()) == (1.5, 0.5)


def test_the_values_are_back_after_an_exception() -> None:
    group = {"lr": 0.1, "betas": (0.9, 0.99)}
    with pytest.raises(LookupError), scaled([group], [Scaling(lr=2, one_minus_beta=0.5)], BACKEND):
        raise LookupError
    assert group == {"lr": 0.1, "betas": (0.9, 0.99)}


@pytest.mark.parametrize(
    ("group", "scaling", "missing"),
    [
        ({"lr": 0.1}, Scaling(weight_decay=2), "weight_decay"),
        ({"weight_decay": 0.1}, Scaling(lr=2), "lr"),
        ({"lr": 0.1}, Scaling(eps=2, one_minus_beta=0.5), "eps or betas"),
        ({"lr": 0.1, "eps": (None, 1e-3)}, Scaling(eps=2), "eps"),  # as in Adafactor
        ({"lr": 0.1, "lambd": 1e-4, "alpha": 0.75}, Scaling(one_minus_beta=2), "betas"),  # as in ASGD
    ],
)
def test_a_factor_for_what_no_group_has_is_refused(group: dict[str, Any], scaling: Scaling, missing: str) -> None:
    with pytest.raises(ValueError, match=f"no parameter group has {missing}; use another rule"):
        inside([group], scaling)


@pytest.mark.parametrize("factor", [11, 10.000001, -0.1])
def test_a_beta_that_would_leave_its_range_is_refused(factor: float) -> None:
    with pytest.raises(
        ValueError, match=r"every beta in \[0, 1\), but the factor .* takes 0\.95? to .*; cut the largest"
    ):
        inside([{"lr": 0.1, "betas": (0.95, 0.9)}], Scaling(one_minus_beta=factor))


@examples(200)
@given(thousandths=st.integers(0, 999), reference=st.integers(1, 10**6))
def test_a_beta_that_is_to_become_zero_does_so_exactly(thousandths: int, reference: int) -> None:
    beta = thousandths / 1000
    k = reference * 1000 / (1000 - thousandths) / reference  # 1 / (1 - beta), up to rounding
    assert moved_beta(beta, k) == 0
    assert moved_beta(beta, k * (1 + 1e-9)) < 0 < moved_beta(beta, k * (1 - 1e-9)) < 1
    assert moved_beta(beta, 1.0) == beta


def test_each_group_has_a_scaling_of_its_own() -> None:
    groups = [{"lr": 0.1, "eps": 1e-8}, {"lr": 0.2, "eps": 1e-8}]
    with scaled(groups, [Scaling(lr=2), Scaling(lr=3, eps=0.5)], BACKEND):
        assert groups == [{"lr": 0.2, "eps": 1e-8}, {"lr": 0.2 * 3, "eps": 5e-9}]
    assert groups == [{"lr": 0.1, "eps": 1e-8}, {"lr": 0.2, "eps": 1e-8}]
    with (
        pytest.raises(ValueError, match="no parameter group has weight_decay"),
        scaled(groups, [Scaling(), Scaling(weight_decay=2)], BACKEND),
    ):
        pass


def test_values_that_somebody_else_changes_in_between_are_refused_and_put_back() -> None:
    group = {"lr": 0.1}
    with pytest.raises(RuntimeError, match="lr changed inside"), scaled([group], [Scaling(lr=2)], BACKEND):
        group["lr"] *= 0.9
    assert group == {"lr": 0.1}


def test_a_rate_may_move_between_steps_and_not_within() -> None:
    lr, rates = torch.tensor(0.5), Rates()
    groups = [{"lr": 0.1}, {"lr": lr}, {}]
    rates.check(groups, inside_step=False)
    rates.check(groups, inside_step=True)
    groups[0]["lr"] = 0.2
    lr.fill_(0.25)
    rates.check(groups, inside_step=False)
    lr.fill_(0.125)
    with pytest.raises(RuntimeError, match="must stay within a step"):
        rates.check(groups, inside_step=True)
