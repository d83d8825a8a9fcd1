"""Multiply the learning rate by a power of k = B / ref_batchsize."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import check_number
from variable_batch_size.rules.base import RuleInput, Scaling


@final
@dataclass(frozen=True, slots=True)
class PowerRule:
    """Multiply the learning rate by a power of k = B / ref_batchsize: lr * k^exponent.

    `PowerRule(1)` is the linear rule and `PowerRule(0.5)` the root rule. If lr was tuned at two batch sizes, the
    exponent is log(lr2 / lr1) / log(B2 / B1).

    Scales: lr by k^exponent.
    Progress: k.
    Use when: the exponent was measured; pass it as `exponent=`.
    Fails when: k leaves the range in which it was measured.

    Args:
        exponent: a number >= 0; 0 keeps lr, and the progress is still k.

    Raises:
        TypeError: if the exponent is not a number.
        ValueError: if it is negative or not finite.

    >>> PowerRule(0.25)(RuleInput(batch_size=1024, ref_batchsize=64)).lr
    2.0
    """

    exponent: float

    def __post_init__(self) -> None:
        checked = check_number(self.exponent, "exponent", "pass 1 for the linear rule, 0.5 for the root rule")
        object.__setattr__(self, "exponent", checked)

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the factor k^exponent on lr."""
        try:
            lr = update.ratio**self.exponent
        except OverflowError:
            lr = math.inf  # which the optimizer refuses
        return Scaling(lr=lr, progress=update.ratio)
