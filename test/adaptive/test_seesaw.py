"""Seesaw: its batch sizes, and the learning-rate rules that they are for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.controllers import Halving
from variable_batch_size.adaptive import ControlInput, Seesaw


@given(st.integers(0, 10**6), st.integers(1, 5000))
def test_seesaw_lowers_the_learning_rate_by_the_root(samples: int, batch_size: int) -> None:
    schedule, critical = Halving(10_000, 900_000), 16 * batch_size
    size = Seesaw(schedule, batch_size, critical)(ControlInput(devices=1, samples=samples))
    factor = schedule(samples)
    assert size == (min(batch_size / factor, critical) if factor else critical)
    if size < critical:
        assert factor * math.sqrt(size / batch_size) == pytest.approx(math.sqrt(factor))


def test_a_higher_learning_rate_makes_no_smaller_batch() -> None:
    assert Seesaw(lambda samples: 1.5, 64, 128)(ControlInput(devices=1)) == 64


def test_seesaw_is_for_rules_that_take_the_root() -> None:
    """In a training; a simulation may measure its progress by any rule."""
    controller = Seesaw(Halving(10_000, 10**6), 8, 64)

    def training(rule: Any) -> None:
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
