"""Hold the timescale of AdamW's weight decay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from variable_batch_size._validation import value_error
from variable_batch_size.rules.base import (
    Rule,
    RuleContext,
    RuleInput,
    Scaling,
    check_rule,
    needs_noise,
    needs_squares,
    scales_betas,
)


@final
@dataclass(frozen=True, slots=True)
class ConstantTimescale:
    """Wrap a rule, and multiply lambda, the weight decay, by k / (the rule's factor on lr), k = B / ref_batchsize.

    B / (lr * lambda), the timescale in samples over which AdamW averages its updates, then stays what it was. Without
    it every rule but the linear-momentum one keeps lambda, and the timescale changes by k / (factor on lr).

    lr * lambda then grows by k under every rule. Bergsma et al. 2025 (arXiv 2505.13738) found the best lambda of
    language models proportional to B at a fixed lr, which is `ConstantTimescale(ConstantRule())`. Where the rule scales
    lr, lambda * k would count the factor on lr twice: here lambda gets what is left of k, sqrt(k) with the root rule.

    Source: Wang and Aitchison 2024, arXiv 2405.13698.

    Args:
        rule: the rule to wrap; its other factors are unchanged.

    Raises:
        TypeError: if that is not a rule.
    """

    rule: Rule

    def __post_init__(self) -> None:
        check_rule(self.rule)

    @property
    def needs_noise(self) -> bool:
        """Whether the wrapped rule uses the gradient noise."""
        return needs_noise(self.rule)

    @property
    def needs_squares(self) -> bool:
        """Whether the wrapped rule needs the squares of the gradients of microbatches."""
        return needs_squares(self.rule)

    @property
    def scales_betas(self) -> bool:
        """Whether the wrapped rule changes betas."""
        return scales_betas(self.rule)

    def check(self, context: RuleContext) -> None:
        """Check as the wrapped rule does."""
        check: Any = getattr(self.rule, "check", None)
        if check is not None:
            check(context)

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the rule's own factors, with k / (factor on lr) on the weight decay."""
        scaling = self.rule(update)
        if isinstance(scaling.lr, (int, float)) and scaling.lr == 0:
            raise value_error(f"{self} divides by the factor on lr, which must not be 0", "0", "return another factor")
        return replace(scaling, weight_decay=update.ratio / scaling.lr)
