"""The learning rate that the gradient noise allows: AdaScale."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, final

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size.rules.base import RuleContext, RuleInput, Scaling, required_noise

# Optimizers that divide the gradient by an estimate of its size.
_ADAM_LIKE = {"Adam", "AdamW", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Adafactor", "Lion", "Muon", "Signum"}


def adascale_gain(sigma2: Any, mu2: Any, batch_size: Any, ref_batchsize: Any) -> Any:
    """Return (sigma^2 / ref + mu^2) / (sigma^2 / B + mu^2), in [1, B / ref] for B >= ref, else in [B / ref, 1].

    The gain is the number of updates at the reference that an update of B samples is worth (Johnson et al. 2020, arXiv
    2007.05105, equation 4, with B / ref for the number of workers). Arguments are floats, or 0-D tensors.

    >>> adascale_gain(sigma2=100.0, mu2=1.0, batch_size=100, ref_batchsize=50)
    1.5
    """
    return (sigma2 / ref_batchsize + mu2) / (sigma2 / batch_size + mu2)


def measured_gain(sigma2: float, mu2: float, batch_size: float, ref_batchsize: float) -> float:
    """Return AdaScale's gain of estimates; min(1, B / ref) before the first one, and if all gradients were 0.

    Negative estimates count as 0. There is no other bound: the gain does not depend on the scale of the loss.

    >>> measured_gain(sigma2=-1.0, mu2=4.0, batch_size=100, ref_batchsize=50)
    1.0
    """
    variance, square = max(sigma2, 0.0), max(mu2, 0.0)
    both = variance + square
    if not both > 0:  # nan before the first estimate
        return min(1.0, batch_size / ref_batchsize)
    # Dividing by the sum of both keeps the quotients of small numbers from underflowing.
    return float(adascale_gain(variance / both, square / both, batch_size, ref_batchsize))


@final
@dataclass(frozen=True, slots=True)
class AdaScaleRule:
    """Multiply the learning rate by AdaScale's gain: lr * gain, see `adascale_gain`.

    Each update makes as much progress as the gradient noise allows.

    Scales: lr by the gain, between 1 and k, that the gradient noise allows.
    Progress: the gain.
    Use when: SGD with any k, if training may use more samples.
    Fails when: most steps have a single microbatch, so that nothing is measured; layers mix samples, as BatchNorm does.
    Source: Johnson et al. 2020, arXiv 2007.05105, algorithm 1.
    """

    needs_noise: ClassVar[bool] = True

    def check(self, context: RuleContext) -> None:
        """Warn if the inner optimizer is like Adam."""
        if adam_like := _ADAM_LIKE.intersection(context.optimizer):
            warnings.warn(
                f"AdaScale's gain is meant for SGD; around {sorted(adam_like)[0]}, which divides the gradient by its "
                f'size, use AdamScaleOptimizer or rule="adamscale", which takes the root of the gain',
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the gain as the factor on lr and as the progress."""
        gain = required_noise(self, update).gain
        return Scaling(lr=gain, progress=gain)
