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
    present = HostStates.present()
    states = {"torch": present.torch.numpy().tobytes().hex(), "numpy": present.numpy, "python": present.python}
    return json.dumps(states, default=np.ndarray.tolist)  # NumPy's state contains an array


def set_rng_states(text: str) -> None:
    """Restore the states of the global RNGs of torch (CPU), NumPy and `random` from the text of `get_rng_states`."""
    states = json.loads(text)
    version, numbers, next_gauss = states["python"]  # lists in JSON; `random.setstate` takes tuples only
    torch_state = torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8)
    HostStates(torch_state, states["numpy"], (version, tuple(numbers), next_gauss)).restore()


@final
class RNGStates:
    """Saved states of this process's host RNGs, for a sampler that sets them when it is read."""

    def __init__(self, text: str) -> None:
        self._text = text

    def set(self) -> None:
        """Set the RNGs of this process to the saved states."""
        set_rng_states(self._text)

    def keep(self) -> None:
        """Replace the saved states by those that the RNGs of this process have now."""
        self._text = get_rng_states()
