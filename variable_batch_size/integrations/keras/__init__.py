"""Keras 3 on the torch backend: `compile` and `fit` as ever, with a batch size that changes."""

from variable_batch_size.integrations.versions import require_version

require_version("keras", "3.10", "keras")
try:
    from keras.config import backend

    found = backend()
except ModuleNotFoundError as error:  # of its default backend
    found = str(error)
if found != "torch":
    remedy = 'set os.environ["KERAS_BACKEND"] = "torch" before keras is imported'
    raise ImportError(f"this needs Keras on the torch backend, got {found}; {remedy}")

from variable_batch_size.integrations.keras.checkpoint import VariableBatchCheckpoint  # noqa: E402
from variable_batch_size.integrations.keras.model import VariableBatchModel  # noqa: E402

__all__ = ["VariableBatchCheckpoint", "VariableBatchModel"]
