"""The states of this process's random generators on the host, as a short text that travels and is stored as it is.

As JSON, because every save waits for it: the generators' 1249 numbers are long in torch.save, and longer in torch.load.
"""

from __future__ import annotations

import json
import random

import numpy as np
import torch


def current() -> str:
    """Those of torch, numpy and random."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    return json.dumps(states, default=np.ndarray.tolist)


def go_on(states: str) -> None:
    """Let the generators draw what they drew after `current()` gave these."""
    found = json.loads(states)
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(found["torch"]), dtype=torch.uint8))
    np.random.set_state(found["numpy"])
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers), gauss))
