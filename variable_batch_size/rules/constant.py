"""Keep the hyperparameters, whatever the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from variable_batch_size.rules.base import RuleInput, Scaling


@final
@dataclass(frozen=True, slots=True)
class ConstantRule:
    """Keep every hyperparameter: factor 1, whatever the batch size.

    Scales: nothing.
    Progress: 1, whatever the batch size.
    Use when: batch sizes differ little, or as a baseline.
    Fails when: batches grow: training slows down, because a sample moves the weights less.

    >>> ConstantRule()(RuleInput(batch_size=96, ref_batchsize=64)).lr
    1.0
    """

    needs_reference: ClassVar[bool] = False

    def __call__(self, update: RuleInput) -> Scaling:
        """Return factors of 1; the training progresses by one update."""
        return Scaling()
