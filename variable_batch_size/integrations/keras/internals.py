"""Everything private of Keras that the integration needs; test_keras_internals.py has what breaks without each."""

from __future__ import annotations

from typing import Any

import keras


def rate_of(optimizer: Any) -> Any:
    """Return the variable or the schedule of an optimizer, of which `learning_rate` is the value."""
    return optimizer._learning_rate


def begin_at(model: Any, epoch: int | None) -> None:
    """Let `fit` begin at an epoch: "can be set by callbacks in on_train_begin", says Keras' Trainer."""
    model._initial_epoch = epoch


def is_masked(outputs: Any) -> bool:
    """Return whether an output of a model has a mask, over whose entries Keras takes means."""
    return any(getattr(output, "_keras_mask", None) is not None for output in keras.tree.flatten(outputs))


def as_saved(model: Any, reduced: Any) -> Any:
    """Return what a copy of a model is made from, by the name of a class that pickle can import."""
    return model.__class__._unpickle_model, reduced[1]
