"""Keras with a trace against one whole batch an update by hand, in float64, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import keras_jobs as jobs
from helpers.keras_backend import keras
from helpers.yardstick import ENDS, EPOCHS, MAX_GRAD_NORM, TRACE, UPDATES, by_hand, network
from helpers.yardstick import weights as flat
from variable_batch_size.integrations.keras import VariableBatchCheckpoint

CYCLE = {"on_end": "cycle"}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jobs.float64():
        yield


def expected(name: str, **options: Any) -> torch.Tensor:
    twin = jobs.Classifier()
    by_hand(twin, jobs.Plain(twin, jobs.OPTIMIZERS[name][0]()), **options)
    return jobs.weights(twin)


@pytest.mark.parametrize("name", jobs.OPTIMIZERS)
@pytest.mark.parametrize("rule", ["root", "adascale"])
@pytest.mark.parametrize("loader", [False, True])
def test_it_makes_the_updates_of_whole_batches(name: str, rule: str, loader: bool) -> None:
    model = jobs.variable(jobs.OPTIMIZERS[name][0](), rule=rule, optimizer_options={"max_grad_norm": MAX_GRAD_NORM})
    history = jobs.fit(model, loader=loader)
    want = expected(name, rule=rule, max_grad_norm=MAX_GRAD_NORM)
    assert model.custom_optimizer.updates == int(model.optimizer.iterations) == UPDATES
    print(name, rule, jobs.difference(model, want))
    assert jobs.difference(model, want) < 1e-12
