"""Models, data and callbacks of Keras for differential_keras.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from differential_common import BATCH, ROWS
from helpers.keras_backend import keras
from helpers.yardstick import CLASSES, FEATURES, samples

OWN = "batch_size", "effective_learning_rate", "samples"  # what only ours logs
layers, callbacks = keras.layers, keras.callbacks
X, Y = samples()[0].numpy().astype("float32"), samples()[1].numpy()
W = np.random.default_rng(0).uniform(0.5, 2.0, len(X)).astype("float32")
TOKENS = np.random.default_rng(0).integers(7, size=(len(X), 6)).astype("int32")


class Recorder(callbacks.Callback):
    """Records every method of a callback, with the logs and the counters of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def note(self, name: str, *arguments: Any, logs: Any = None) -> None:
        """Record a call; a number comes before the logs, if there is one."""
        *number, logs = arguments if logs is None else (*arguments, logs)
        rate = float(self.model.optimizer.learning_rate)
        counters = int(self.model.optimizer.iterations), rate, self.model.stop_training, *number
        self.events.append([name, *counters, without(logs or {}), {**self.params}])


for hook in dir(callbacks.Callback):
    if hook.startswith("on_"):
        setattr(Recorder, hook, lambda self, *args, _name=hook, **named: self.note(_name, *args, **named))


def without(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs without those of ours."""
    return {name: value for name, value in logs.items() if name not in OWN}


class Evaluating(callbacks.Callback):
    """Evaluates within an epoch and at its end, and ends the training within an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Reset the metrics, as an evaluation does."""
        if batch == 5:
            self.model.evaluate(X[:30], Y[:30], verbose=0)
        self.model.stop_training = int(self.model.optimizer.iterations) == 30

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add to the logs."""
        logs["test"] = self.model.evaluate(X[:30], Y[:30], verbose=0)[0]


class Rates(callbacks.Callback):
    """Sets the learning rate of each batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Let it fall."""
        self.model.optimizer.learning_rate = 0.1 / (1 + batch)


def stack(*parts: Any, rows: Any = None) -> Any:
    """Return a Sequential model."""
    return keras.Sequential([keras.Input((FEATURES,)) if rows is None else rows, *parts])


def dense(*middle: Any, **how: Any) -> Any:
    """Return a classifier."""
    return stack(layers.Dense(16, activation="tanh", **how), *middle, layers.Dense(CLASSES))


def tokens(*parts: Any, **how: Any) -> Any:
    """Return a model of tokens."""
    return stack(layers.Embedding(7, 4, **how), *parts, rows=keras.Input((6,), dtype="int32"))


def outputs() -> Any:
    """Return a functional model with two inputs and two outputs."""
    inputs = {"x": keras.Input((FEATURES,)), "w": keras.Input((1,))}
    joined = layers.Concatenate()([inputs["x"], layers.Dense(3)(inputs["w"])])
    return keras.Model(inputs, {"a": layers.Dense(CLASSES)(joined), "b": layers.Dense(1)(joined)})


class Own(keras.Model):
    """A subclass with a loss and metrics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = dense(activity_regularizer="l2"), keras.metrics.Mean(name="seen")

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the output, and add a loss."""
        found = self.net(x, training=training)
        self.add_loss(0.01 * keras.ops.mean(keras.ops.abs(found)))
        return found

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Return the mean loss, and count it by the row."""
        rows = keras.ops.sum(keras.ops.square(y_pred), axis=-1)
        self.seen.update_state(rows)
        own = 0.01 * keras.ops.mean(rows)
        return own if y is None else own + super().compute_loss(x, y, y_pred, sample_weight)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Return a metric besides."""
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "constant": 3.0}


class Trained(keras.Sequential):
    """A model with a step of its own."""

    def train_step(self, data: Any) -> Any:
        """Train as Keras does."""
        return super().train_step(data)


class Rows(keras.utils.PyDataset):
    """A PyDataset."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return X[index * BATCH : (index + 1) * BATCH], Y[index * BATCH : (index + 1) * BATCH]


def stream() -> Iterator[Any]:
    """Yield batches without an end."""
    while True:
        yield from map(Rows().__getitem__, range(4))


def arrays(plain: bool, *parts: Any) -> dict[str, Any]:
    """Return the arguments of `fit` for arrays."""
    return {"batch_size": BATCH if plain else ROWS, **dict(zip("xy", parts or (X, Y), strict=True))}


def loader(plain: bool, *parts: Any, **how: Any) -> dict[str, Any]:
    """Return the arguments of `fit` for a DataLoader."""
    rows = TensorDataset(*map(torch.as_tensor, parts or (X, Y)))
    return {"x": DataLoader(rows, BATCH if plain else ROWS, **how)}


def tensors(found: Any) -> list[Any]:
    """Return arrays or variables as tensors."""
    return [torch.as_tensor(np.array(one.value.detach() if isinstance(one, keras.Variable) else one)) for one in found]


def read(path: Path) -> Any:
    """Return the weights in a file of Keras."""
    found: dict[str, Any] = {}
    if path.suffix == ".keras":
        loaded = keras.models.load_model(path)
        found = {"weights": tensors(loaded.get_weights()), "optimizer": tensors(loaded.optimizer.variables)}
    elif path.suffix == ".h5":
        with h5py.File(path) as file:
            file.visititems(
                lambda name, one: found.update({name: np.array(one).tolist()}) if hasattr(one, "shape") else None
            )
    return found


def evaluate(model: Any, folder: Path) -> Any:
    """Return what evaluations find, and save the model."""
    model.save(folder / "end.keras")
    return [model.evaluate(X, Y, verbose=0, return_dict=True), torch.as_tensor(model.predict(X[:40], verbose=0))]


def one(kind: Any, *arguments: Any, **options: Any) -> Callable[..., Any]:
    """Return a function that makes a callback."""
    return lambda _: [kind(*arguments, **options)]


def saver(name: str, **options: Any) -> Callable[[Path], list[Any]]:
    """Return a function that makes a ModelCheckpoint."""
    return lambda folder: [callbacks.ModelCheckpoint(folder / name, **options)]


def images() -> Any:
    """Return a model of images."""
    return stack(layers.Rescaling(0.1), layers.Dense(CLASSES), rows=keras.Input((6,), dtype="uint8"))
