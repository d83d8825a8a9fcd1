"""An ordinary model of Keras on the samples of the yardstick, in float32."""

from __future__ import annotations

from typing import Any

from helpers.keras_backend import keras
from helpers.yardstick import CLASSES, FEATURES, MICROBATCH, TRACE, samples
from variable_batch_size.integrations.keras import VariableBatchModel

LOSS = keras.losses.SparseCategoricalCrossentropy
X, Y = (part.numpy().astype(kind) for part, kind in zip(samples(), ("float32", "int64"), strict=True))


def dense(*middle: Any) -> Any:
    return keras.Sequential([keras.layers.Dense(16, activation="tanh"), *middle, keras.layers.Dense(CLASSES)])


def made(model: Any = None, optimizer: Any = "sgd", **options: Any) -> Any:
    wrapped = VariableBatchModel(model or dense(), TRACE, "root", 16, {"fixed_shape": False, **options})
    wrapped.compile(optimizer, LOSS(from_logits=True), metrics=["accuracy"])
    return wrapped


def fit(model: Any, epochs: int = 1, **options: Any) -> Any:
    return model.fit(X, Y, batch_size=MICROBATCH, epochs=epochs, verbose=0, **options)


def functional() -> Any:
    inputs = keras.Input((FEATURES,))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(inputs))
