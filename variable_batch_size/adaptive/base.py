"""What a controller gets and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from variable_batch_size.adaptive.throughput import Throughput
from variable_batch_size.rules.base import Noise


@final
@dataclass(frozen=True, slots=True)
class ControlInput:
    """What a controller may use to choose the batch size of the next updates.

    Attributes:
        devices: number of devices that compute them, >= 1.
        batch_size: samples of the last update; None before the first one.
        minibatch_size: maximum number of rows of a microbatch; None if it is not known.
        updates: number of updates so far.
        samples: number of samples of all updates so far.
        progress: how far the training is, in updates at `ref_batchsize`.
        noise: the gradient noise; None if it is not measured.
        throughput: the time of an update; None if it is not known.
    """

    devices: int
    batch_size: int | None = None
    minibatch_size: int | None = None
    updates: int = 0
    samples: int = 0
    progress: float = 0.0
    noise: Noise | None = None
    throughput: Throughput | None = None


class Controller(Protocol):
    """Chooses the global batch size: a pure function."""

    def __call__(self, input: ControlInput, /) -> int:
        """Return the number of samples of each of the next updates, >= 1."""
        ...
