"""Keras 3 on the torch backend: `compile` and `fit` as ever, with a batch size that changes."""

from variable_batch_size.integrations.versions import require_version

require_version("keras", "3.10", "keras")

_ERROR = 'this needs Keras on the torch backend, got {}; set os.environ["KERAS_BACKEND"] = "torch" before its import'
try:
    import keras
except ModuleNotFoundError as error:  # of its default backend
    raise ImportError(_ERROR.format(error)) from error
if keras.config.backend() != "torch":
    raise ImportError(_ERROR.format(keras.config.backend()))

from variable_batch_size.integrations.keras.checkpoint import VariableBatchCheckpoint  # noqa: E402
from variable_batch_size.integrations.keras.model import VariableBatchMixin, VariableBatchModel  # noqa: E402

__all__ = ["VariableBatchCheckpoint", "VariableBatchMixin", "VariableBatchModel"]
