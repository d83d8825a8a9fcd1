"""Keras 3 on the torch backend: `compile` and `fit` as ever, with a batch size that changes."""

from variable_batch_size.integrations.keras.backend import keras as _keras  # noqa: F401  (or an error, before others)
from variable_batch_size.integrations.keras.checkpoint import VariableBatchCheckpoint
from variable_batch_size.integrations.keras.model import VariableBatchModel

__all__ = ["VariableBatchCheckpoint", "VariableBatchModel"]
