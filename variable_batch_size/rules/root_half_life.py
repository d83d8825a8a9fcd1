"""The root rule for Adam, with the half-life of the second moment held in samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from variable_batch_size.rules.base import RuleContext, RuleInput, Scaling, check_second_moment


@final
@dataclass(frozen=True, slots=True)
class RootHalfLifeRule:
    """Multiply Adam's learning rate by the root of k = B / ref_batchsize, and raise beta2 to the power k: beta2^k.

    The weight of a gradient in the second moment then halves after as many samples as at the reference. beta2 stays in
    [0, 1) for every k. beta1 and eps stay. RMSprop's alpha is the beta2 here. Where beta2 is close to 1, beta2^k is
    nearly 1 - k (1 - beta2), with which the sqrt-sde rule scales both betas.

    Scales: lr by sqrt(k), beta2 to beta2^k.
    Progress: k.
    Use when: Adam, AdamW or RMSprop with batches smaller than the reference.
    Fails when: sqrt(k) is too much: in the language models of the paper, lr grew by 3 where B grew by 1024.
    Source: Marek et al. 2025, arXiv 2507.07101, equation 2.

    >>> RootHalfLifeRule()(RuleInput(batch_size=256, ref_batchsize=64)).scaled_betas((0.5, 0.5))
    (0.5, 0.0625)
    """

    scales_betas: ClassVar[bool] = True

    def check(self, context: RuleContext) -> None:
        """Raise TypeError unless the inner optimizer is Adam, AdamW or RMSprop, or a subclass."""
        check_second_moment(self, context)

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the factor sqrt(k) on lr, and the power k of beta2."""
        return Scaling(lr=update.ratio**0.5, beta2_power=update.ratio, progress=update.ratio)
