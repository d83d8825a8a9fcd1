"""Files and copies of a Keras model with a trace: those of the model without one."""

from __future__ import annotations

import copy
import io
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from helpers.keras_backend import keras
from helpers.keras_plain import LOSS, X, fit, functional
from helpers.yardstick import CLASSES, FEATURES, TRACE
from variable_batch_size.integrations.keras import VariableBatchModel


@keras.saving.register_keras_serializable(package="tests")
class Registered(keras.Model):
    def __init__(self, units: int = 16, **options: Any) -> None:
        super().__init__(**options)
        self.units = units
        self.first, self.last = keras.layers.Dense(units), keras.layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


class Unregistered(Registered):
    pass


def sequential() -> Any:
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(16), keras.layers.Dense(CLASSES)])


def trained(make: Callable[[], Any]) -> tuple[Any, Any]:
    """A model with a trace, and a plain one with the same names, weights and state of the optimizer."""
    models = []
    for wrap in (lambda model: VariableBatchModel(model, TRACE)), (lambda model: model):
        keras.backend.clear_session()  # names begin anew
        keras.utils.set_random_seed(1)
        model = wrap(make())
        model.compile(keras.optimizers.Adam(0.01), LOSS(from_logits=True), metrics=["accuracy"])
        models.append(model)
    with_trace, plain = models
    fit(with_trace)
    fit(plain)
    plain.set_weights(with_trace.get_weights())
    for own, other in zip(plain.optimizer.variables, with_trace.optimizer.variables, strict=True):
        own.assign(other.value)
    return with_trace, plain


def content(file: Path) -> tuple[str, dict[str, Any]]:
    """The configuration of a .keras file, without the addresses of objects, and the arrays by their names."""
    arrays: dict[str, Any] = {}
    with zipfile.ZipFile(file) as parts:
        with h5py.File(io.BytesIO(parts.read("model.weights.h5"))) as weights:
            weights.visititems(lambda name, item: arrays.update({name: item[()] if hasattr(item, "shape") else None}))
        return re.sub(r', "shared_object_id": \d+', "", parts.read("config.json").decode()), arrays


WRITERS: dict[str, Callable[[Any, Path], Any]] = {
    "save": lambda model, file: model.save(file),
    "keras.saving.save_model": keras.saving.save_model,
    "within an outer model": lambda model, file: outer(model).save(file),
}


def outer(model: Any) -> Any:
    inputs, end = keras.Input((FEATURES,), name="start"), keras.layers.Softmax(name="end")
    made = keras.Sequential([inputs, model, end], name="outer")
    made.compile(keras.optimizers.SGD(0.01, name="sgd"), "mse")
    return made


@pytest.mark.parametrize("make", [sequential, functional, Registered])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_is_that_of_the_plain_model(writer: str, make: Any, tmp_path: Path) -> None:
    files = []
    for name, model in zip(("trace", "plain"), trained(make), strict=True):
        WRITERS[writer](model, tmp_path / f"{name}.keras")
        files.append(content(tmp_path / f"{name}.keras"))
    (config, arrays), (expected, values) = files
    assert config == expected
    assert arrays.keys() == values.keys()
    assert all(np.array_equal(arrays[name], values[name]) for name in values)
    assert keras.saving.load_model(tmp_path / "trace.keras").predict(X, verbose=0).shape == (len(X), CLASSES)


@pytest.mark.parametrize("make", [sequential, functional, Registered, Unregistered])
def test_a_description_is_that_of_the_plain_model(make: Any) -> None:
    model, plain = trained(make)
    assert model.to_json() == plain.to_json()
    assert keras.saving.serialize_keras_object(model) == keras.saving.serialize_keras_object(plain)
    assert model.__class__ is type(plain)
    assert isinstance(model, VariableBatchModel)


@pytest.mark.parametrize("make", [sequential, functional, Registered])
def test_a_copy_is_what_save_writes(make: Any) -> None:
    model, plain = trained(make)
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(model)
    found = copy.deepcopy(model)
    assert type(found) is type(plain)
    assert np.array_equal(found.predict(X, verbose=0), model.predict(X, verbose=0))
    for own, other in zip(found.optimizer.variables, model.optimizer.variables, strict=True):
        assert np.array_equal(own.numpy(), other.numpy())
    before = model.custom_optimizer.updates
    fit(model, 2)  # the model still has its trace
    fit(VariableBatchModel(found, TRACE))  # and the copy may get one
    assert model.custom_optimizer.updates > before
