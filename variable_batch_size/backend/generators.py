"""The random number generators of this process: those of torch, NumPy and `random`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


def seed_host(seed: int) -> None:
    """Seed torch, on the CPU and on CUDA, NumPy and `random`."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() takes 20 times as long
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class HostStates(NamedTuple):
    """States of the generators of this process: of torch on the CPU and on CUDA, NumPy and `random`.

    Attributes:
        torch: of torch on the CPU, as bytes.
        numpy: as `numpy.random.get_state(legacy=False)` returns it.
        python: as `random.getstate()` returns it.
        cuda: of the present CUDA device, as bytes; None to leave it as it is.
    """

    torch: Tensor
    numpy: dict[str, Any]
    python: tuple[Any, ...]
    cuda: Tensor | None = None

    @classmethod
    def present(cls) -> HostStates:
        """Return the states that the generators have now."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        return cls(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate(), cuda)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


@contextmanager
def kept_states() -> Iterator[None]:
    """Restore the states of the generators of this process after the block, as if it had drawn nothing."""
    states = HostStates.present()
    try:
        yield
    finally:
        states.restore()
