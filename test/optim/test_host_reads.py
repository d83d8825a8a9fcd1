"""An update reads nothing from a device: on the device "meta", whose tensors have no values, each read raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import variable_batch_size as vbs
from helpers.gpu import VARYING, divided_updates, make, updates
from helpers.reference import OPTIMIZERS


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 1.0}, {"noise": "differenced"}], ids=lambda one: "".join(one)
)
def test_an_update_reads_nothing_from_the_device(kind: type[vbs.CustomOptimizer], options: dict[str, Any]) -> None:
    make(updates(kind, VARYING, "meta", **options), 10)


def test_denominators_are_not_read_from_the_device() -> None:
    make(divided_updates(VARYING, "meta"), 10)


def test_a_read_of_this_device_raises() -> None:
    value = torch.ones((), device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        value.item()
    with pytest.raises(NotImplementedError, match="meta"):
        value.cpu()
