"""The factors of a rule on parameter groups: applied within a step, and the user's own objects before and after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.properties import examples
from variable_batch_size.backend import LocalBackend
from variable_batch_size.optim.scaling import HyperparameterScaling, LearningRateCheck
from variable_batch_size.rules.base import Scaling

Group = dict[str, Any]


def scaling_of(groups: list[Group]) -> HyperparameterScaling:
    """The scaling of an optimizer that has these parameter groups."""
    inner = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    inner.param_groups = groups
    return HyperparameterScaling(inner, LocalBackend())


def scaled(groups: list[Group], scaling: Scaling) -> list[Group]:
    """Return the hyperparameters within the step, and check that the same objects are back after it."""
    before = [dict(group) for group in groups]
    with scaling_of(groups).apply(len(groups) * [scaling]):
        within = [dict(group) for group in groups]
    assert all(group[name] is old[name] for group, old in zip(groups, before, strict=True) for name in old)
    return within


@examples(100)
@given(
    lr=st.floats(1e-6, 10),
    decay=st.floats(0, 1),
    betas=st.tuples(st.floats(0.5, 0.999), st.floats(0.5, 0.999)),
    factor=st.floats(0.01, 2),
)
def test_every_hyperparameter_is_multiplied_by_its_factor(
    lr: float, decay: float, betas: tuple[float, float], factor: float
) -> None:
    group = {"lr": lr, "weight_decay": decay, "betas": betas, "eps": 1e-8, "momentum": 0.9}
    scaling = Scaling(lr=factor, weight_decay=3 * factor, one_minus_beta=factor, eps=factor / 7)
    assert scaled([group], scaling) == [
        {
            "lr": lr * factor,
            "weight_decay": decay * (3 * factor),
            "betas": tuple(pytest.approx(1 - factor * (1 - beta)) for beta in betas),
            "eps": 1e-8 * (factor / 7),
            "momentum": 0.9,
        }
    ]


def test_scales_groups_with_different_hyperparameters() -> None:
    groups = [{"lr": 0.1}, {"lr": 0.2, "weight_decay": 0.5}, {"alpha": 0.99}]
    within = scaled(groups, Scaling(lr=2, weight_decay=2, one_minus_beta=2))
    assert within == [{"lr": 0.2}, {"lr": 0.4, "weight_decay": 1.0}, {"alpha": pytest.approx(0.98)}]


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    lr = torch.tensor(0.5)
    (within,) = scaled([{"lr": lr}], Scaling(lr=3))
    assert isinstance(within["lr"], torch.Tensor)
    assert (within["lr"].item(), lr.item()) == (1.5, 0.5)


def test_restores_the_values_after_an_exception() -> None:
    group = {"lr": 0.1, "betas": (0.9, 0.99)}
    with pytest.raises(LookupError), scaling_of([group]).apply([Scaling(lr=2, one_minus_beta=0.5)]):
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
def test_rejects_a_factor_for_a_hyperparameter_that_no_group_has(group: Group, scaling: Scaling, missing: str) -> None:
    with pytest.raises(ValueError, match=f"no parameter group has {missing}; use another rule"):
        scaled([group], scaling)


@pytest.mark.parametrize("factor", [11, 10.000001, -0.1])
@pytest.mark.parametrize(
    "group", [{"lr": 0.1, "betas": (0.95, 0.9)}, {"lr": 0.1, "alpha": 0.9}], ids=["betas", "alpha"]
)
def test_rejects_a_beta_outside_its_range(group: Group, factor: float) -> None:
    with pytest.raises(
        ValueError, match=r"every beta in \[0, 1\), but the factor .* changes 0\.95? to .*; limit the largest"
    ):
        scaled([group], Scaling(one_minus_beta=factor))


def test_a_power_is_that_of_the_second_beta_or_of_alpha() -> None:
    groups = [{"lr": 0.1, "betas": (0.5, 0.25)}, {"lr": 0.1, "alpha": 0.25}, {"lr": 0.1, "alpha": 0.25, "lambd": 0.1}]
    within = scaled(groups, Scaling(beta2_power=0.5))
    assert [group.get("betas", group.get("alpha")) for group in within] == [(0.5, 0.5), 0.5, 0.25]
    with pytest.raises(ValueError, match="no parameter group has betas"):
        scaled(groups[2:], Scaling(beta2_power=0.5))


@pytest.mark.parametrize("power", [0, -1, 1e-18])
@pytest.mark.parametrize(("name", "beta"), [("beta1_power", 0.95), ("beta2_power", 0.9)])
def test_rejects_a_power_that_takes_a_beta_out_of_its_range(name: str, beta: float, power: float) -> None:
    match = rf"but .*{name}={power:g}.* changes {beta} to .*; let the rule return larger exponents"
    with pytest.raises(ValueError, match=match):
        scaled([{"lr": 0.1, "betas": (0.95, 0.9)}], Scaling(**{name: power}))


def test_each_group_has_its_own_scaling() -> None:
    groups = [{"lr": 0.1, "eps": 1e-8}, {"lr": 0.2, "eps": 1e-8}]
    with scaling_of(groups).apply([Scaling(lr=2), Scaling(lr=3, eps=0.5)]):
        assert groups == [{"lr": 0.2, "eps": 1e-8}, {"lr": 0.2 * 3, "eps": 5e-9}]
    assert groups == [{"lr": 0.1, "eps": 1e-8}, {"lr": 0.2, "eps": 1e-8}]
    with (
        pytest.raises(ValueError, match="no parameter group has weight_decay"),
        scaling_of(groups).apply([Scaling(), Scaling(weight_decay=2)]),
    ):
        pass


def test_rejects_and_restores_values_that_change_within_the_step() -> None:
    group = {"lr": 0.1}
    with pytest.raises(RuntimeError, match="lr changed inside"), scaling_of([group]).apply([Scaling(lr=2)]):
        group["lr"] *= 0.9
    assert group == {"lr": 0.1}


# ---------------------------------------------------------------------------------- a factor that stays on the device


def momentum_sgd(weights: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.5, momentum=0.9)


@pytest.mark.parametrize("factor", [0.0, 0.25, 3.0])
def test_a_deferred_factor_equals_a_factor_on_lr(factor: float) -> None:
    initial = torch.tensor([1.0, -2.0], dtype=torch.float64)
    found, expected = (initial.clone().requires_grad_() for _ in range(2))
    deferred, plain = momentum_sgd([found]), momentum_sgd([expected])
    scaling = HyperparameterScaling(deferred, LocalBackend(), deferred_lr=True)
    for gradient in (torch.tensor([1.0, 3.0]), torch.tensor([-2.0, 0.5])):
        found.grad, expected.grad = (gradient.double() for _ in range(2))
        with scaling.apply([Scaling(lr=torch.tensor(factor, dtype=torch.float64))]):
            assert deferred.param_groups[0]["lr"] == 0.5
            deferred.step()
        plain.param_groups[0]["lr"] = 0.5 * factor
        plain.step()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_deferred_factor_comes_before_later_hooks_and_ends_with_its_step() -> None:
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    inner = torch.optim.SGD([weight], lr=1.0)
    scaling = HyperparameterScaling(inner, LocalBackend(), deferred_lr=True)
    seen: list[float] = []
    inner.register_step_post_hook(lambda *_: seen.append(weight.item()))
    with scaling.apply([Scaling(lr=torch.tensor(0.5))]):
        inner.step()
    with pytest.raises(LookupError), scaling.apply([Scaling(lr=torch.tensor(0.5))]):
        raise LookupError
    inner.step()
    assert seen == [-0.5, -1.5]


# ---------------------------------------------------------------------------------- learning rates within a step


def test_a_learning_rate_may_change_between_steps_and_not_within_a_step() -> None:
    lr, check = torch.tensor(0.5), LearningRateCheck()
    groups: list[Group] = [{"lr": 0.1}, {"lr": lr}, {}]
    check.check(groups, inside_step=False)
    check.check(groups, inside_step=True)
    groups[0]["lr"] = 0.2
    lr.fill_(0.25)
    check.check(groups, inside_step=False)
    lr.fill_(0.125)
    with pytest.raises(RuntimeError, match="must stay constant within a step"):
        check.check(groups, inside_step=True)
