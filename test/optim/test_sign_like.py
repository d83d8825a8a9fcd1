"""Rules of the noise around Lion, Signum and Muon, which use the sign of the gradient, or that of a matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from helpers.reference import SIZES, assert_equal, batches, filled, training
from helpers.sign_like import Lion, Signum

Muon = getattr(torch.optim, "Muon", None)
INNERS = [Lion, Signum, pytest.param(Muon, marks=pytest.mark.skipif(Muon is None, reason="this torch has no Muon"))]
LR = 0.01
around_each = pytest.mark.parametrize("inner", INNERS)


def matrices() -> nn.Module:
    """f(x) = W tanh(V x): Muon takes matrices only."""
    layers = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
    return filled(layers.double())


def factor(rule: str, gain: float, k: float) -> float:
    return {"adamscale": gain**0.5, "surge": gain / k**0.5}[rule]


@around_each
@pytest.mark.parametrize("rule", ["adamscale", "surge"])
def test_each_update_is_that_of_the_optimizer_with_lr_times_the_factor(inner: Any, rule: str) -> None:
    options: dict[str, Any] = {"inner": inner, "hyperparameters": {"lr": LR}, "rule": rule, "ref_batchsize": 16}
    run = training(vbs.CustomOptimizer, SIZES, model=matrices(), **options)
    plain = training(vbs.ConstantOptimizer, SIZES, model=matrices())
    by_hand = inner(plain.model.parameters(), lr=LR)
    gains, start = [], plain.weights()[0].copy()
    for batch in batches(SIZES, 50):
        run.run(1)
        gains.append(run.optimizer.noise().gain)
        scaled = factor(rule, gains[-1], len(batch) / 16)
        assert run.optimizer.lr_factor() == pytest.approx(scaled)
        plain.loss(batch.tolist()).backward()
        by_hand.param_groups[0]["lr"] = LR * scaled
        by_hand.step()
        by_hand.zero_grad()
    assert len({round(gain, 6) for gain in gains}) == len(SIZES)
    assert abs(plain.weights()[0] - start).max() > LR
    tolerance = 1e-2 if inner is Muon else 1e-12  # Muon's iteration runs in bfloat16
    assert_equal(run.weights(), plain.weights(), tolerance)


@around_each
def test_adascale_warns_around_each(inner: Any) -> None:
    with pytest.warns(UserWarning, match=f"AdaScale's gain is meant for SGD; around {inner.__name__}, which divides"):
        training(vbs.AdaScaleOptimizer, model=matrices(), inner=inner, hyperparameters={"lr": LR})
