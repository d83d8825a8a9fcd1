"""AdaScale for Adam: the root of the gain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from variable_batch_size.rules.base import RuleInput, Scaling, required_noise


@final
@dataclass(frozen=True, slots=True)
class AdamScaleRule:
    """Multiply the learning rate of Adam and similar optimizers by the root of AdaScale's gain: lr * sqrt(gain).

    The gain comes from the plain gradients, before Adam divides them, and it is the progress of the update.

    It is also for Lion and Signum, which use the sign of the gradient. The best learning rate of SGD goes with the gain
    (McCandlish et al. 2018, arXiv 1812.06162, equation 2.6), theirs with sqrt(k) while B is small beside the noise
    scale and the gain nearly k (Li et al. 2024, arXiv 2405.14578, equation 13). For larger B that paper predicts the
    surge rule. For `torch.optim.Muon` the root is an analogy: it orthogonalizes the gradient, which drops its size.

    Scales: lr by sqrt(gain).
    Progress: the gain.
    Use when: Adam, AdamW, Lion, Signum or Muon with any k, if training may use more samples.
    Fails when: most steps have a single microbatch, or layers mix samples; Adam's own scaling hides the noise.
    Source: Qiao et al. 2021, arXiv 2008.12260, section 3.2.
    """

    needs_noise: ClassVar[bool] = True

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the root of the gain as the factor on lr, and the gain as the progress."""
        gain = required_noise(self, update).gain
        return Scaling(lr=math.sqrt(gain) if isinstance(gain, float) else gain.sqrt(), progress=gain)
