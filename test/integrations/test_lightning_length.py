"""Lightning with a trace that has an end, such as a CSV file: the training ends before it, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.lightning_jobs import (
    ALLOWED,
    Classifier,
    Validated,
    difference,
    fit,
    inner_of,
    loader,
    saved,
    saver,
    strategy,
)
from helpers.yardstick import EPOCHS, UPDATES, by_hand, network, weights

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in ALLOWED]

TWENTY = [20] * 20  # of which the eleventh ends the first epoch, and none the second one


def twin(updates: int) -> nn.Module:
    """A training by hand of so many updates."""
    model = network()
    by_hand(model, inner_of("SGD", model), sizes=[20] * (3 * UPDATES), updates=updates)
    return model


@pytest.mark.parametrize("max_epochs", [EPOCHS, -1])
@pytest.mark.parametrize("max_steps", [5, 11, 15, 20])
def test_max_steps_within_the_trace(max_steps: int, max_epochs: int) -> None:
    module = Classifier()
    run = fit(module, strategy=strategy(trace=TWENTY), max_steps=max_steps, max_epochs=max_epochs)
    assert (run.global_step, module.estimate) == (max_steps, max_steps)
    assert difference(module.net, weights(twin(max_steps))) < 1e-12


@pytest.mark.parametrize(
    ("rows", "ends"),
    [(11, {"max_epochs": 1}), (20, {"max_epochs": 1, "max_steps": 1000}), (22, {"max_epochs": 2})],
)
def test_max_epochs_within_the_trace(rows: int, ends: dict[str, int], tmp_path: Path) -> None:
    data = {"train_dataloaders": loader(), "val_dataloaders": loader(shuffle=False, batch_size=50)}
    options: dict[str, Any] = {"data": data, **ends}
    module, trace = Validated(), [20] * rows
    updates = 11 * ends["max_epochs"]
    run = fit(module, strategy=strategy(trace=trace), callbacks=[saver(tmp_path)], enable_checkpointing=True, **options)
    assert (run.global_step, run.current_epoch) == (updates, ends["max_epochs"])
    assert difference(module.net, weights(twin(updates))) < 1e-12
    for stop in updates - 1, updates:
        again = Validated()
        run = fit(again, saved(tmp_path, stop), strategy=strategy(trace=trace), **options)
        assert (run.global_step, run.current_epoch) == (updates, ends["max_epochs"])
        assert difference(again.net, weights(module.net)) == 0.0


class Untrained(Classifier):
    """A module that is refused before it asks for the length of the training, or trains."""

    def configure_optimizers(self) -> Any:
        return inner_of("SGD", self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (
            {"max_steps": 21, "max_epochs": -1},
            r"must last until .* 1 updates before max_updates=21; add steps",
        ),
        ({"max_epochs": 3}, "20 steps end in epoch 1, .* before the end of epoch 2; add steps"),
        (
            {"max_epochs": -1},
            "got one of 20 steps; pass max_steps to the Trainer, or sampler_op",
        ),
    ],
)
def test_a_trace_that_is_too_short_is_refused_before_the_first_update(ends: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(Untrained(), strategy=strategy(trace=TWENTY), **ends)


@pytest.mark.parametrize("stop", [7, 11, 15])
def test_a_training_that_max_steps_has_ended_continues_to_a_later_one(tmp_path: Path, stop: int) -> None:
    data = {"train_dataloaders": loader(), "val_dataloaders": loader(shuffle=False, batch_size=50)}
    options: dict[str, Any] = {"data": data}
    torch.manual_seed(1)
    fit(
        Validated(),
        strategy=strategy(trace=TWENTY),
        max_steps=15,
        callbacks=[saver(tmp_path)],
        enable_checkpointing=True,
        **options,
    )
    module = Validated()
    run = fit(module, saved(tmp_path, stop), strategy=strategy(trace=TWENTY), max_steps=20, **options)
    assert run.global_step == 20
    assert difference(module.net, weights(twin(20))) < 1e-12
