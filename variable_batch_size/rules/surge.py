"""The learning rate of sign-like optimizers, which falls again where the batch exceeds the noise scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import check_number
from variable_batch_size.rules.adascale import adascale_gain
from variable_batch_size.rules.base import Factor, Noise, RuleInput, Scaling, required_noise


@final
@dataclass(frozen=True, slots=True)
class SurgeRule:
    """Multiply the learning rate by f(B) / f(ref_batchsize), f(B) = 2 / (sqrt(B_noise / B) + sqrt(B / B_noise)).

    The best learning rate of an optimizer that uses the sign of the gradient rises with the root of B, is largest at
    B_noise and falls beyond it. The factor equals gain / sqrt(k), with AdaScale's gain and k = B / ref_batchsize.

    In the paper, B_noise also depends on the curvature, and changes during training. This rule uses the measured noise
    scale, sigma^2 / mu^2, or the argument. Before the first estimate the factor is the root of min(1, k), as with
    AdamScale. The gain is also what the paper's theorem 5 says an update is worth at its best learning rate.

    Scales: lr by gain / sqrt(k), which falls where B exceeds the noise scale.
    Progress: the gain.
    Use when: Adam, Lion or Signum with batches around the noise scale.
    Fails when: sigma^2 / mu^2 is far from the peak, as in language models (Merrill et al. 2025, arXiv 2505.23971).
    Source: Li et al. 2024, arXiv 2405.14578, equation 13.

    Args:
        noise_scale: B_noise, in samples; None measures it, in which case an optimizer needs updates of two or more
            microbatches.

    Raises:
        TypeError: if it is neither None nor a number.
        ValueError: if it is negative or not finite.

    >>> [SurgeRule(noise_scale=256)(RuleInput(size, ref_batchsize=64)).lr for size in (64, 256, 1024)]
    [1.0, 1.25, 1.0]
    """

    noise_scale: float | None = None

    def __post_init__(self) -> None:
        if self.noise_scale is not None:
            remedy = "pass the batch size at which lr is largest, or None to measure the noise"
            object.__setattr__(self, "noise_scale", check_number(self.noise_scale, "noise_scale", remedy))

    @property
    def needs_noise(self) -> bool:
        """Whether the noise scale is measured."""
        return self.noise_scale is None

    def __call__(self, update: RuleInput) -> Scaling:
        """Return gain / sqrt(k) as the factor on lr, and the gain as the progress."""
        root = update.ratio**0.5
        if self.noise_scale is None:
            noise = required_noise(self, update)
            return Scaling(lr=_lr_factor(noise, root), progress=noise.gain)
        gain = adascale_gain(self.noise_scale, 1.0, update.batch_size, update.ref_batchsize)
        return Scaling(lr=gain / root, progress=gain)


def _lr_factor(noise: Noise, root: float) -> Factor:
    """Return gain / sqrt(k), the factor on lr for a batch of k times the reference; `root` is sqrt(k).

    Before the first estimate of the noise, when sigma^2 is nan, it is the root of the gain.
    """
    if isinstance(noise.gain, float):
        return noise.gain**0.5 if math.isnan(noise.sigma2) else noise.gain / root
    return noise.gain.sqrt().where(noise.sigma2.isnan(), noise.gain / root)
