"""What the tests of each integration import."""

from __future__ import annotations

import importlib.util

NEEDED = {
    "sentences": ["sentence_transformers"],
    "transformers": ["transformers", "accelerate", "datasets", "trl"],
    "accelerate": ["accelerate", "datasets"],
    "lightning": ["lightning"],
    "ignite": ["ignite", "datasets"],
    "keras": ["keras"],
    "jax": ["jax"],
    "torchft": ["torchft"],
    "ray": ["ray"],
}  # the word in the name of a test file -> what it imports


def missing(file: str) -> list[str]:
    """Return what a test file of this name needs, and is not installed."""
    names = {name for word in NEEDED if word in file for name in NEEDED[word]}
    return sorted(name for name in names if importlib.util.find_spec(name) is None)
