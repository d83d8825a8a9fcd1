"""Keras, if it is there, new enough, and on the torch backend: the package imports it here first."""

from __future__ import annotations

from variable_batch_size.integrations.versions import require_version

require_version("keras", "3.10", "keras")

_WAY_OUT = 'set os.environ["KERAS_BACKEND"] = "torch" before keras is imported'
try:
    import keras as keras
except ModuleNotFoundError as error:  # of its default backend
    raise ImportError(f"this needs Keras on the torch backend, got {error}; {_WAY_OUT}") from error
if keras.config.backend() != "torch":
    raise ImportError(f"this needs Keras on the torch backend, got {keras.config.backend()}; {_WAY_OUT}")
