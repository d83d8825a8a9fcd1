"""The private names of Keras are in one file, and a promise breaks without each."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import keras_jobs as jobs
from helpers.keras_backend import keras
from helpers.keras_plain import LOSS, X, fit, functional, made
from helpers.private_names import private_names
from helpers.yardstick import TRACE, UPDATES
from variable_batch_size.integrations.keras import VariableBatchCheckpoint, VariableBatchModel, model, optimizer


def test_private_names_are_in_one_file() -> None:
    plain = functional()
    plain.compile("sgd", "mse")
    theirs = plain, plain.optimizer, keras.callbacks.CallbackList(), keras.layers.Embedding(2, 2)
    found = private_names("keras", [*theirs, type("Output", (), {"_keras_mask": None})])
    found["optimizer.py"].discard("_version")  # of torch's tensors
    found = {file: names for file, names in found.items() if names}
    assert found == {"internals.py": {"_initial_epoch", "_keras_mask", "_learning_rate", "_unpickle_model"}}


def test_a_training_resumes_at_its_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `_initial_epoch`: otherwise `fit` trains all epochs again, and ends late."""
    for left_out in True, False:
        with pytest.raises(jobs.StopError):
            fit(made(), 3, callbacks=[VariableBatchCheckpoint(tmp_path / str(left_out), every=1), jobs.StopAfter(14)])
        if left_out:
            monkeypatch.setattr(model, "begin_at", lambda *_: None)
        resumed = made()
        fit(resumed, 3, callbacks=[VariableBatchCheckpoint(tmp_path / str(left_out))])
        assert (resumed.custom_optimizer.updates > UPDATES) is left_out
        monkeypatch.undo()


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


def test_a_copy_is_a_model_of_its_own_class() -> None:
    """By `_unpickle_model`: the class of a model with a trace cannot be imported."""
    with_trace = made(functional())
    fit(with_trace)
    copy = pickle.loads(pickle.dumps(with_trace))
    assert type(copy) is with_trace.__class__
    assert np.array_equal(copy.predict(X, verbose=0), with_trace.predict(X, verbose=0))
    assert not isinstance(VariableBatchModel(copy, TRACE), type(None))
