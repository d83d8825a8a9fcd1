"""A batch size that follows the noise scale of the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from variable_batch_size._validation import check_positive
from variable_batch_size.adaptive.base import ControlInput, as_samples, finite_noise_scale, unchanged


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
        return unchanged(self, input) if scale is None else as_samples(self.factor * scale)
