"""A batch size that grows until the noise of an update is small beside its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from variable_batch_size._validation import check_positive
from variable_batch_size.adaptive.base import ControlInput, as_samples, finite_noise_scale, unchanged


@final
@dataclass(frozen=True, slots=True)
class NormTest:
    """Controller that raises the batch size until the norm test holds: B' = max(B, ceil(B_noise / eta^2)).

    The test asks whether the variance of an update's gradient, sigma^2 / B, is at most eta^2 times the squared norm of
    the gradient. Here this is the unbiased mu^2. The papers take that of the gradient of the batch, which is
    mu^2 + sigma^2 / B on average, so that their batches end at 1 - eta^2 times these. The batch size never falls, and
    stays what it is before the first estimate of the noise and while the estimate of mu^2 is not positive.

    Use when: batches are to grow with the training, from small ones, without a schedule to tune.
    Fails when: mu^2 becomes small, as it does near a minimum: the batch size grows without bound, and one bad estimate
    is never taken back; limit it.
    Source: Byrd et al. 2012, Mathematical Programming 134, section 3; Lau et al. 2024, arXiv 2412.21124, where the
    samples of the test are microbatches, as in our estimate.

    >>> from variable_batch_size.rules.base import Noise
    >>> NormTest(eta=0.5)(ControlInput(devices=1, batch_size=64, noise=Noise(sigma2=2000.0, mu2=1.0)))
    8000

    Args:
        eta: largest ratio of the noise to the norm of the gradient, > 0; smaller ones give larger batches.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is not finite and > 0.
    """

    eta: float

    needs_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "eta", check_positive(self.eta, "eta", "pass a ratio such as 0.5"))

    def __call__(self, input: ControlInput, /) -> int:
        """Return the larger one of the batch size and that of the test.

        Raises:
            ValueError: if the noise is not measured, or the noise scale not known and there is no batch size to keep.
        """
        scale = finite_noise_scale(self, input)
        if scale is None:
            return unchanged(self, input)
        return max(input.batch_size or 1, as_samples(scale / self.eta / self.eta, math.ceil))
