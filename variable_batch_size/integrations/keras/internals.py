"""Everything private of Keras that the integration needs; test_keras_internals.py has what breaks without each."""

from __future__ import annotations

from typing import Any

import keras


def rate_of(optimizer: Any) -> Any:
    """Return the variable or the schedule of an optimizer, of which `learning_rate` is the value."""
    return optimizer._learning_rate


def build(model: Any, microbatch: Any) -> None:
    """Create the variables of a model and of its metrics as `fit` does, without a forward, which might draw numbers."""
    model._symbolic_build(data_batch=microbatch)


def is_masked(outputs: Any) -> bool:
    """Return whether an output of a model has a mask, over whose entries Keras takes means."""
    return any(getattr(output, "_keras_mask", None) is not None for output in keras.tree.flatten(outputs))
