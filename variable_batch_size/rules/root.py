"""Multiply the learning rate by sqrt(k), k = B / ref_batchsize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from variable_batch_size.rules.base import RuleInput, Scaling


@final
@dataclass(frozen=True, slots=True)
class RootRule:
    """Multiply the learning rate by the root of k = B / ref_batchsize: lr * sqrt(k).

    An update has the same variance as at the reference.

    Scales: lr by sqrt(k).
    Progress: k.
    Use when: AdamW and Muon.
    Fails when: SGD with small k, where it is slower than the linear rule.
    Source: Krizhevsky 2014, arXiv 1404.5997, section 5.

    >>> RootRule()(RuleInput(batch_size=256, ref_batchsize=64)).lr
    2.0
    """

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the factor sqrt(k) on lr."""
        return Scaling(lr=update.ratio**0.5, progress=update.ratio)
