"""Models, data and callbacks of Keras for comparing a plain training with ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import TensorDataset

from helpers import our_order
from helpers.keras_backend import keras
from helpers.keras_plain import X, Y
from helpers.our_order import BATCH, ROWS
from helpers.yardstick import CLASSES, FEATURES

layers, callbacks = keras.layers, keras.callbacks
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
        self.events.append([name, *counters, dict(logs or {}), {**self.params}])


for hook in dir(callbacks.Callback):
    if hook.startswith("on_"):
        setattr(Recorder, hook, lambda self, *args, _name=hook, **named: self.note(_name, *args, **named))


class Evaluating(callbacks.Callback):
    """Evaluates within an epoch and at its end, and ends the training within an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Reset the metrics, as an evaluation does."""
        if batch == 5:
            self.model.evaluate(X[:30], Y[:30], verbose=0)
        self.model.stop_training = int(self.model.optimizer.iterations) == 30

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["test"] = self.model.evaluate(X[:30], Y[:30], verbose=0)[0]


class Rates(callbacks.Callback):
    """Sets the learning rate of each batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.1 / (1 + batch)


def stack(*parts: Any, rows: Any = None) -> Any:
    return keras.Sequential([keras.Input((FEATURES,)) if rows is None else rows, *parts])


def dense(*middle: Any, **how: Any) -> Any:
    return stack(layers.Dense(16, activation="tanh", **how), *middle, layers.Dense(CLASSES))


def tokens(*parts: Any, **how: Any) -> Any:
    return stack(layers.Embedding(7, 4, **how), *parts, rows=keras.Input((6,), dtype="int32"))


def outputs() -> Any:
    inputs = {"x": keras.Input((FEATURES,)), "w": keras.Input((1,))}
    joined = layers.Concatenate()([inputs["x"], layers.Dense(3)(inputs["w"])])
    return keras.Model(inputs, {"a": layers.Dense(CLASSES)(joined), "b": layers.Dense(1)(joined)})


class Own(keras.Model):
    """A subclass with a loss and metrics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = dense(activity_regularizer="l2"), keras.metrics.Mean(name="seen")

    def call(self, x: Any, training: bool = False) -> Any:
        found = self.net(x, training=training)
        self.add_loss(0.01 * keras.ops.mean(keras.ops.abs(found)))
        return found

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        rows = keras.ops.sum(keras.ops.square(y_pred), axis=-1)
        self.seen.update_state(rows)
        own = 0.01 * keras.ops.mean(rows)
        return own if y is None else own + super().compute_loss(x, y, y_pred, sample_weight)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "constant": 3.0}


class Trained(keras.Sequential):
    """A model with a step of its own."""

    def train_step(self, data: Any) -> Any:
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
    return {"batch_size": BATCH if plain else ROWS, **dict(zip("xy", parts or (X, Y), strict=True))}


def loader(plain: bool, *parts: Any, **how: Any) -> dict[str, Any]:
    return {"x": our_order.loader(plain, TensorDataset(*map(torch.as_tensor, parts or (X, Y))), **how)}


def tensors(found: Any) -> list[Any]:
    return [torch.as_tensor(np.array(one.value.detach() if isinstance(one, keras.Variable) else one)) for one in found]


def read(path: Path) -> Any:
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
    model.save(folder / "end.keras")
    return [model.evaluate(X, Y, verbose=0, return_dict=True), torch.as_tensor(model.predict(X[:40], verbose=0))]


def one(kind: Any, *arguments: Any, **options: Any) -> Callable[..., Any]:
    return lambda _: [kind(*arguments, **options)]


def saver(name: str, **options: Any) -> Callable[[Path], list[Any]]:
    return lambda folder: [callbacks.ModelCheckpoint(folder / name, **options)]


def images() -> Any:
    return stack(layers.Rescaling(0.1), layers.Dense(CLASSES), rows=keras.Input((6,), dtype="uint8"))
