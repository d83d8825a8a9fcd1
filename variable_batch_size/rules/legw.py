"""Linear-epoch gradual warm-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import check_number
from variable_batch_size.rules.base import RuleInput, Scaling


@final
@dataclass(frozen=True, slots=True)
class LEGWRule:
    """Multiply the learning rate by sqrt(k) min(1, u / U) at update u = 1, 2, ...: linear-epoch gradual warm-up.

    The length of the warm-up in epochs grows with the batch size, so in updates it is always U. This is the one rule
    with a warm-up of its own: its factor at the reference is 1 only after it.

    Scales: lr by sqrt(k), after a warm-up.
    Progress: k.
    Use when: batches are large from the start; `warmup_epochs=` is the warm-up at `ref_batchsize`.
    Fails when: batches grow later: the warm-up is over by then.
    Source: You et al. 2019, arXiv 1901.08256, section 3.

    Args:
        warmup_updates: U, in updates; 0 for no warm-up.

    Raises:
        TypeError: if U is not a number.
        ValueError: if U is negative or not finite.
    """

    warmup_updates: float

    def __post_init__(self) -> None:
        checked = check_number(self.warmup_updates, "warmup_updates", "pass the length of the warm-up in updates")
        object.__setattr__(self, "warmup_updates", checked)

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the factor on lr; the warm-up begins with 1 / U and not with 0."""
        number = update.updates + 1  # u
        warmup = number / self.warmup_updates if number < self.warmup_updates else 1.0
        return Scaling(lr=update.ratio**0.5 * warmup, progress=update.ratio)
