"""The states of this process's host RNGs as a short text, which ranks exchange and checkpoints store.

The text is JSON because every save waits for it: `torch.save` and `torch.load` are slower for these 1249 numbers.
"""

from __future__ import annotations

import json
from typing import final

import numpy as np
import torch

from variable_batch_size.backend.generators import HostStates


def get_rng_states() -> str:
    """Return the states of the global RNGs of torch (CPU), NumPy and `random`."""
    now = HostStates.present()
    states = {"torch": now.torch.numpy().tobytes().hex(), "numpy": now.numpy, "python": now.python}
    return json.dumps(states, default=np.ndarray.tolist)


def set_rng_states(text: str) -> None:
    """Restore the RNG states that `get_rng_states` returned."""
    states = json.loads(text)
    version, numbers, gauss = states["python"]
    of_torch = torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8)
    HostStates(of_torch, states["numpy"], (version, tuple(numbers), gauss)).restore()


@final
class RNGStates:
    """Saved states of this process's host RNGs, for a sampler that sets them when it is read."""

    def __init__(self, text: str) -> None:
        self._text = text

    def set(self) -> None:
        """Set the RNGs to the states."""
        set_rng_states(self._text)

    def keep(self) -> None:
        """Take the states that the RNGs have now."""
        self._text = get_rng_states()
