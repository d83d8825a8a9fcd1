"""Keras 3 on the torch backend, which this chooses if nobody has: `compile` and `fit` as ever."""

import os

from variable_batch_size.integrations.versions import require_version

require_version("keras", "3.10", "keras")
os.environ.setdefault("KERAS_BACKEND", "torch")

import keras  # noqa: E402

if (found := keras.config.backend()) != "torch":
    raise ImportError(
        f'this needs Keras on the torch backend, got {found}; set os.environ["KERAS_BACKEND"] = "torch" before'
    )

from variable_batch_size.integrations.keras.checkpoint import VariableBatchCheckpoint  # noqa: E402
from variable_batch_size.integrations.keras.model import VariableBatchModel, VariableBatchModelMixin  # noqa: E402

__all__ = ["VariableBatchCheckpoint", "VariableBatchModel", "VariableBatchModelMixin"]
