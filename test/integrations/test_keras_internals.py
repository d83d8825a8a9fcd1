"""The private names of Keras are in one file, and a promise breaks without each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.keras_backend import keras
from helpers.keras_plain import LOSS, fit, functional, made
from helpers.private_names import private_names
from helpers.yardstick import CLASSES
from variable_batch_size.integrations.keras import VariableBatchModel, model, optimizer


def test_private_names_are_in_one_file() -> None:
    plain = functional()
    plain.compile("sgd", "mse")
    theirs = plain, plain.optimizer, keras.callbacks.CallbackList(), keras.layers.Embedding(2, 2)
    found = private_names("keras", [*theirs, type("Output", (), {"_keras_mask": None})])
    assert found == {"internals.py": {"_keras_mask", "_learning_rate", "_symbolic_build"}}


class Noisy(keras.layers.Layer):
    """Draws in each forward, also outside of training."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        return x + keras.random.normal((1,), seed=self.seeds)


def test_variables_are_created_without_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `_symbolic_build`: a forward would draw numbers, so that a training would not be that of Keras."""

    def forward(built: Any, microbatch: Any) -> None:
        built.test_step(microbatch)
        built.optimizer.build(built.trainable_variables)

    drawn = []
    for left_out in False, True:
        if left_out:
            monkeypatch.setattr(model, "build", forward)
        fit(trained := made(keras.Sequential([Noisy(), keras.layers.Dense(CLASSES)])))
        drawn.append(int(trained.layers[0].seeds.state.value[1]))
    assert 0 < drawn[0] == drawn[1] - 1


def test_a_schedule_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `_learning_rate`: `learning_rate` is the value, and cannot be set back."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    fit(trained := made(optimizer=keras.optimizers.SGD(schedule)))
    assert float(trained.optimizer.learning_rate) < 0.01
    monkeypatch.setattr(optimizer, "rate_of", lambda wrapped: wrapped.learning_rate)
    with pytest.raises(AttributeError, match="assign"):
        fit(made(optimizer=keras.optimizers.SGD(schedule)))


def test_a_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `_keras_mask`: without, each microbatch is a mean over what it counts, in silence."""
    layers = [keras.layers.Embedding(10, 4, mask_zero=True), keras.layers.Dense(3)]
    ones: Any = np.ones((16, 5), int)
    for left_out in True, False:
        if left_out:
            monkeypatch.setattr(model, "is_masked", lambda _: False)
        masked = VariableBatchModel(keras.Sequential(layers), 8)
        masked.compile("sgd", LOSS(from_logits=True))
        if left_out:
            masked.fit(ones, ones, verbose=0)
        else:
            with pytest.raises(ValueError, match="must have no mask"):
                masked.fit(ones, ones, verbose=0)
        monkeypatch.undo()
