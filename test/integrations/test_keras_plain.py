"""A Keras model with a constant trace against a plain one whose `batch_size` is that of the trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import keras_jobs as jobs
from helpers.keras_backend import keras
from helpers.keras_plain import LOSS, X, Y, fit, functional, made
from helpers.yardstick import CLASSES, FEATURES
from variable_batch_size.integrations.keras import VariableBatchCheckpoint, VariableBatchModel

SIZE = 16


class Own(keras.Model):
    """A model whose class overrides methods of Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.last = keras.layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.last(x)


def trained(make: Callable[[], Any], x: Any, y: Any = None, loss: Any = None, **options: Any) -> tuple[Any, Any]:
    """A plain model and one with a trace, each trained for two epochs."""
    models = []
    for wrap, rows in (lambda model: model, SIZE), (lambda model: VariableBatchModel(model, SIZE), 5):
        keras.utils.set_random_seed(1)
        model = wrap(make())
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss or LOSS(from_logits=True))
        model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0, **options)
        models.append(model)
    plain, with_trace = models
    return plain, with_trace


def assert_equal(plain: Any, with_trace: Any) -> None:
    for own, other in zip(with_trace.get_weights(), plain.get_weights(), strict=True):
        assert own == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert with_trace.history.history["loss"] == pytest.approx(plain.history.history["loss"], rel=1e-5)


class Backward(keras.callbacks.Callback):
    """Looks at a gradient, and leaves it."""

    def __init__(self, event: str) -> None:
        super().__init__()
        setattr(self, event, lambda *_, logs=None: keras.ops.mean(self.model(X) ** 2).backward())


@pytest.mark.parametrize("event", ["on_train_begin", "on_train_batch_begin", "on_train_batch_end"])
def test_gradients_that_a_callback_leaves_are_no_part_of_an_update(event: str) -> None:
    assert_equal(*trained(functional, X, Y, callbacks=[Backward(event)]))


def test_weights_without_targets_are_left_out() -> None:
    class Encoder(Own):
        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
            assert y is sample_weight is None
            return keras.ops.mean(y_pred**2)

    assert_equal(*trained(Encoder, X, sample_weight=np.ones(len(X))))


@pytest.mark.parametrize("split", [0.0, 0.2])
def test_targets_and_weights_may_be_none_for_an_output(split: float) -> None:
    def several() -> Any:
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, [keras.layers.Dense(CLASSES)(inputs), keras.layers.Dense(1)(inputs)])

    weight, options = np.linspace(0, 2, len(X), dtype="float32"), {"validation_split": split}
    both = [LOSS(from_logits=True), "mse"]
    assert_equal(*trained(several, X, [Y, X[:, :1]], both, sample_weight=[weight, None], **options))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        assert_equal(*trained(several, X, [Y, None], [both[0], None], **options))


def test_what_compute_metrics_returns_is_logged() -> None:
    class Metrics(Own):
        def compute_metrics(self, x: Any, y: Any, y_pred: Any, **weight: Any) -> Any:
            return {**super().compute_metrics(x, y, y_pred, **weight), "mine": 3.0}

    plain, with_trace = trained(Metrics, X, Y)
    assert with_trace.history.history["mine"] == plain.history.history["mine"] == [3.0, 3.0]


def test_a_callback_knows_the_number_of_updates_when_the_training_begins() -> None:
    class Steps(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.steps_at_begin = self.params["steps"]

    plain, with_trace = trained(functional, X, Y, callbacks=[Steps()])
    assert with_trace.steps_at_begin == plain.steps_at_begin == 13


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("stop", [11, 14])
def test_a_resume_keeps_the_numbers_of_epochs(stop: int, every: int | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"initial_epoch": 2, "epochs": 5}
    whole = fit(model := made(), **options)
    with pytest.raises(jobs.StopError):
        fit(made(), callbacks=[VariableBatchCheckpoint(tmp_path, every=every), jobs.StopAfter(stop)], **options)
    resumed = fit(other := made(), callbacks=[VariableBatchCheckpoint(tmp_path, every=every)], **options)
    assert resumed.epoch == [3, 4] == whole.epoch[1:]
    assert other.custom_optimizer.updates == model.custom_optimizer.updates


@pytest.mark.parametrize("stop", [11, 14])
def test_a_fit_after_one_that_was_ended_has_the_epochs_that_it_is_given(stop: int) -> None:
    fit(model := made(), 3, callbacks=[jobs.StopTrainingAfter(stop)])
    assert fit(model, 7, initial_epoch=5).epoch == [5, 6]
