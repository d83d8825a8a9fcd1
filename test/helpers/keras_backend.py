"""Keras on the torch backend, imported by all tests that need it."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")

import keras

__all__ = ["keras"]
