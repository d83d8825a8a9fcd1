"""The linear rule inside SGD's velocity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from variable_batch_size.rules.base import RuleContext, RuleInput, Scaling


@final
@dataclass(frozen=True, slots=True)
class LinearMomentumRule:
    """Apply the linear rule inside SGD's velocity: u = m u + k (G + decay w), w -= lr u, k = B / ref_batchsize.

    Each gradient keeps the weight of its own batch size, while lr stays: what the velocity has from smaller batches is
    not scaled when the batch grows. The paper calls that scaling momentum correction, and advises it where lr changes;
    the linear rule makes it, because lr multiplies PyTorch's whole velocity. The two are the same if k is constant.

    Scales: gradient and weight decay by k.
    Progress: k.
    Use when: SGD with a batch that grows.
    Fails when: k is large, or early in training, like the linear rule.
    Source: Goyal et al. 2017, arXiv 1706.02677, equation 10, without momentum correction.
    """

    def check(self, context: RuleContext) -> None:
        """Raise TypeError unless the inner optimizer is SGD, or a subclass."""
        if "SGD" not in context.optimizer:
            raise TypeError(
                f"{self} scales what enters SGD's velocity, so the inner optimizer must be a torch.optim.SGD, got "
                f"{context.optimizer[0]}; use the linear rule instead"
            )

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the factor k on gradient and weight decay."""
        return Scaling(gradient=update.ratio, weight_decay=update.ratio, progress=update.ratio)
