"""Controllers that follow the noise scale of the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from variable_batch_size._validation import check_positive, value_error
from variable_batch_size.adaptive.base import ControlInput, Controller, as_samples
from variable_batch_size.rules.base import Noise


def required_noise(controller: Controller, input: ControlInput) -> Noise:
    """Return the noise of the gradients in the input; raise ValueError if it is not measured."""
    if input.noise is None:
        remedy = "measure it, or pass noise=NoiseCurve.from_csv(...) to simulate"
        raise value_error(f"{controller} needs the gradient noise", "noise=None", remedy)
    return input.noise


def finite_noise_scale(controller: Controller, input: ControlInput) -> float | None:
    """Return the noise scale of the gradients, sigma^2 / mu^2, in samples; None while there is no estimate of mu^2 > 0.

    Args:
        controller: the controller that needs it, for the error.
        input: what the controller gets.

    Raises:
        ValueError: if the noise is not measured.
    """
    scale = float(required_noise(controller, input).noise_scale)
    return scale if math.isfinite(scale) else None


def keep_batch_size(controller: Controller, input: ControlInput) -> int:
    """Return the batch size that was chosen last, for a controller that knows too little to choose one.

    Args:
        controller: the controller, for the error.
        input: what the controller gets.

    Raises:
        ValueError: if no batch size was chosen yet.
    """
    if input.batch_size is None:
        requirement = f"{controller} needs a batch size to keep while it knows too little to choose one"
        raise value_error(requirement, "batch_size=None", "pass start=")
    return input.batch_size


@final
@dataclass(frozen=True, slots=True)
class NoiseScale:
    """Controller whose batch size is proportional to the noise scale: B = factor * B_noise, B_noise = sigma^2 / mu^2.

    At B_noise half of the squared norm of an update's gradient is noise: an update is worth half of one with the true
    gradient, and a sample half of one in a small batch. The batch size stays what it is before the first estimate of
    the noise, and while the estimate of mu^2 is not positive.

    Use when: SGD on a task whose noise scale was seen to predict where larger batches stop helping.
    Fails when: training language models: their critical batch size differs from B_noise by orders of magnitude, and
    changes otherwise during the training (Merrill et al. 2025, arXiv 2505.23971); measure it there.
    Source: McCandlish et al. 2018, arXiv 1812.06162, section 2.2.

    >>> from variable_batch_size.rules.base import Noise
    >>> NoiseScale(factor=0.5)(ControlInput(devices=1, noise=Noise(sigma2=2000.0, mu2=1.0)))
    1000

    Args:
        factor: batch size / noise scale, > 0.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is not finite and > 0.
    """

    factor: float = 1.0

    needs_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", check_positive(self.factor, "factor", "pass 1 for the noise scale itself"))

    def __call__(self, input: ControlInput, /) -> int:
        """Return factor * B_noise, rounded.

        Raises:
            ValueError: if the noise is not measured, or the noise scale not known and there is no batch size to keep.
        """
        scale = finite_noise_scale(self, input)
        return keep_batch_size(self, input) if scale is None else as_samples(self.factor * scale)


@final
@dataclass(frozen=True, slots=True)
class NormTest:
    """Controller that raises the batch size until the norm test holds: B' = max(B, ceil(B_noise / eta^2)).

    The test asks whether the variance of an update's gradient, sigma^2 / B, is at most eta^2 times the squared norm of
    the gradient. Here this is the unbiased mu^2. The papers take the squared norm of the batch gradient,
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
        """Return the present batch size, or the one at which the norm test holds if that is larger.

        Raises:
            ValueError: if the noise is not measured, or the noise scale not known and there is no batch size to keep.
        """
        scale = finite_noise_scale(self, input)
        if scale is None:
            return keep_batch_size(self, input)
        return max(input.batch_size or 1, as_samples(scale / self.eta / self.eta, math.ceil))
