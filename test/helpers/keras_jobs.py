"""The yardstick's training in Keras, what Keras' optimizers compute by hand, and jobs for processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.keras_backend import keras
from helpers.yardstick import (
    CLASSES,
    EPOCHS,
    FEATURES,
    MAX_GRAD_NORM,
    MICROBATCH,
    REF,
    STOPS,
    TRACE,
    UPDATES,
    Samples,
    by_hand,
    network,
    samples,
)
from variable_batch_size.integrations.keras import VariableBatchCheckpoint, VariableBatchModel


@contextmanager
def float64() -> Iterator[None]:
    """Let Keras keep float64, which it does in no layer by default."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


class Linear(keras.layers.Layer):
    """A layer in float64: on torch, Keras' own operations round float64 to float32 (`keras.ops.matmul`, for one)."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(dtype="float64")
        self.kernel = self.add_weight(shape=(rows, columns))
        self.bias = self.add_weight(shape=(rows,))
        self.built = True

    def call(self, x: Any) -> Any:
        return nn.functional.linear(x, self.kernel.value, self.bias.value)


class Classifier(keras.Model):
    """`yardstick.network` as a Keras model, with the same weights and a loss in float64."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = Linear(16, FEATURES), Linear(CLASSES, 16)
        self.dropout = keras.layers.Dropout(dropout, seed=7, dtype="float64")
        for variable, parameter in zip(self.trainable_variables, network().parameters(), strict=True):
            variable.assign(parameter.detach())
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.dropout(torch.tanh(self.first(x)), training=training))

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        return nn.functional.cross_entropy(y_pred, y)


def weights(trained: Any) -> Tensor:
    """All weights in one vector, in the order and shapes of `yardstick.network`."""
    return torch.cat([v.value.detach().flatten() for v in trained.trainable_variables])


def difference(trained: Any, expected: Tensor) -> float:
    """The largest difference of a weight from `expected`, relative to the largest one there."""
    return float((weights(trained) - expected).abs().max() / expected.abs().max())


def variable(optimizer: Any, trace: Any = TRACE, rule: str = "root", dropout: float = 0.0, **options: Any) -> Any:
    """The compiled model of the yardstick, with a trace."""
    settings = {"fixed_shape": False, **options.pop("sampler_options", {})}
    made = VariableBatchModel(Classifier(dropout), trace, rule, REF, settings, **options)
    made.compile(optimizer, metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")])
    return made


def fit(trained: Any, epochs: int = EPOCHS, loader: bool = False, **options: Any) -> Any:
    """Train it on the samples of the yardstick."""
    if loader:
        return trained.fit(DataLoader(Samples(), MICROBATCH, shuffle=True), epochs=epochs, verbose=0, **options)
    x, target = samples()
    return trained.fit(x, target, batch_size=MICROBATCH, epochs=epochs, verbose=0, **options)


class StopError(Exception):
    """The end of a run that is interrupted."""


class StopAfter(keras.callbacks.Callback):
    """Interrupts a training after so many updates."""

    def __init__(self, updates: int) -> None:
        super().__init__()
        self.updates = updates

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.model.custom_optimizer.updates == self.updates:
            raise StopError

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.on_train_batch_begin(0)


class StopTrainingAfter(keras.callbacks.Callback):
    """Ends a training after so many updates."""

    def __init__(self, updates: int) -> None:
        super().__init__()
        self.updates = updates

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.custom_optimizer.updates == self.updates:
            self.model.stop_training = True


class Seen(keras.callbacks.Callback):
    """Keeps what Keras logs at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(dict(logs or {}))


# What Keras' optimizers compute, as torch optimizers for `by_hand`. ------------------------------------------------


class SGDTwin(Optimizer):
    """v <- momentum v - lr g; w <- w + v, of Keras; in torch lr is no part of v."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, global_clipnorm: float | None = None) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "clip": global_clipnorm})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        if group["clip"] is not None:
            norm = float(torch.cat([p.grad.flatten() for p in group["params"]]).norm())
            for parameter in group["params"]:
                parameter.grad *= group["clip"] / max(norm, group["clip"])
        for parameter in group["params"]:
            state = self.state[parameter]
            state["v"] = group["momentum"] * state.get("v", 0.0) - group["lr"] * parameter.grad
            parameter += state["v"]


class AdamWTwin(Optimizer):
    """w <- (1 - lr decay) w, then lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps), as Keras computes it."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.004, eps: float = 1e-7) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        for parameter in group["params"]:
            state = self.state[parameter]
            state["t"] = t = state.get("t", 0) + 1
            state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * parameter.grad
            state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * parameter.grad**2
            rate = group["lr"] * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
            parameter *= 1 - group["lr"] * group["weight_decay"]
            parameter -= rate * state["m"] / (state["v"].sqrt() + group["eps"])


class Plain(Optimizer):
    """A Keras optimizer for a model by hand, because Keras' Adam rounds its bias correction to float32."""

    def __init__(self, trained: Any, wrapped: Any) -> None:
        self.trained, self.wrapped = trained, wrapped
        lr = float(wrapped.learning_rate)
        super().__init__([v.value for v in trained.trainable_variables], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.wrapped.learning_rate = self.param_groups[0]["lr"]
        variables = self.trained.trainable_variables
        self.wrapped.apply([v.value.grad for v in variables], variables)


OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Optimizer]]] = {
    "SGD": (lambda lr=0.1: keras.optimizers.SGD(lr, momentum=0.9), lambda p: SGDTwin(p, 0.1)),
    "AdamW": (lambda lr=0.01: keras.optimizers.AdamW(lr), lambda p: AdamWTwin(p, 0.01)),
}


# Jobs. -------------------------------------------------------------------------------------------------------------


def expected(name: str, **options: Any) -> Tensor:
    """The weights after one whole batch an update by hand."""
    twin = Classifier()
    by_hand(twin, Plain(twin, OPTIMIZERS[name][0]()), **options)
    return weights(twin)


def save(folder: Path, name: str, **values: Any) -> None:
    """Write what a rank has found."""
    torch.save(values, folder / f"{name}-{dist.get_rank()}.pt")


def ranks_train(folder: Path) -> None:
    """Each optimizer and rule; a resume after each of five updates; and an adaptive trace."""
    with float64():
        clip = {"max_grad_norm": MAX_GRAD_NORM}
        for name, (make, _) in OPTIMIZERS.items():
            for rule in "root", "adascale":
                trained = variable(make(), rule=rule, optimizer_options=clip)
                if dist.get_rank():
                    trained.last.bias.assign_add(torch.ones(CLASSES))  # rank 0's weights count
                history = fit(trained).history
                save(folder, f"{name}-{rule}", weights=weights(trained), history=history)
        make = OPTIMIZERS["SGD"][0]
        whole = variable(make(), dropout=0.3)
        logs = fit(whole).history
        for stop in STOPS:
            parts = folder / f"dropout-{stop}"
            first = variable(make(), dropout=0.3)
            try:
                fit(first, callbacks=[VariableBatchCheckpoint(parts, every=1), StopAfter(stop)])
            except StopError:
                assert first.custom_optimizer.updates == stop
            second = variable(make(), dropout=0.3)
            resumed = fit(second, callbacks=[VariableBatchCheckpoint(parts, every=1)])
            end = resumed.history["loss"][-1] - logs["loss"][-1]
            save(folder, f"resumed-{stop}", found=(difference(second, weights(whole)), end))


@dataclass(frozen=True)
class Sawtooth:
    """A pure controller: 8 to 44 samples, by the number of updates."""

    def __call__(self, input: Any) -> int:
        return 8 + 12 * (input.updates // 3 % 4)


def adaptive_trace() -> Any:
    """A trace that a controller continues every 3 updates."""
    return vbs.AdaptiveTrace(Sawtooth(), start=20, bounds=(8, 64), every=3, delay=4)


def stopped(folder: Path, stop: int) -> None:
    """Train until `stop`, with checkpoints."""
    with float64():
        try:
            fit(
                variable(OPTIMIZERS["AdamW"][0]()),
                callbacks=[VariableBatchCheckpoint(folder, every=1), StopAfter(stop)],
            )
        except StopError:
            return
    raise AssertionError


def resumed(folder: Path, name: str) -> None:
    """Resume, in any world, and write the weights."""
    with float64():
        trained = variable(OPTIMIZERS["AdamW"][0]())
        fit(trained, callbacks=[VariableBatchCheckpoint(folder, every=1)])
        assert trained.custom_optimizer.updates == UPDATES
        save(folder, name, weights=weights(trained))
