"""Multiply the learning rate by k = B / ref_batchsize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from variable_batch_size.rules.base import RuleInput, Scaling


@final
@dataclass(frozen=True, slots=True)
class LinearRule:
    """Multiply the learning rate by k = B / ref_batchsize: lr * k.

    A sample moves the weights as far as at the reference. With momentum in PyTorch's form (u = m u + g, w -= lr u) no
    momentum correction is needed, because the learning rate multiplies the whole velocity.

    Scales: lr by k.
    Progress: k.
    Use when: SGD with k up to about 4, after a gradual warm-up, which its source prescribes.
    Fails when: k is large, or early in training: it diverges.
    Source: Goyal et al. 2017, arXiv 1706.02677, section 2.1.

    >>> LinearRule()(RuleInput(batch_size=96, ref_batchsize=64)).lr
    1.5
    """

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the factor k on lr."""
        return Scaling(lr=update.ratio, progress=update.ratio)
