"""Batch-size-invariant Adam: the linear rule for Adam, whose second moment does not depend on the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from variable_batch_size.rules.base import RuleInput, Scaling


@final
@dataclass(frozen=True, slots=True)
class InvariantAdamRule:
    """Multiply the learning rate of Adam or AdamW by k = B / ref_batchsize, with the second moment of the reference.

    Adam divides by the root of v, an average of G^2, whose expectation g^2 + sigma^2 / B falls as the batch grows. Here
    v averages G^2 + a (A - G^2), elementwise, where A = sum_j (n_j / B) g_j^2 is the mean square of the gradients of
    the J microbatches of an update, and a = (k - 1) / (J - 1). Its expectation is g^2 + sigma^2 / ref_batchsize, as
    in plain Adam at the reference, for any microbatches. An update then moves the weights as k updates of plain Adam
    at the reference do, up to the square of the learning rate, whether or not noise dominates the gradient. The betas
    become beta1^k and beta2^k, so that both averages reach as many samples back.

    The paper averages A itself, as a = 1 would: v is then as for a batch as large as a microbatch.

    For k < 1 no mean of squares makes G^2 smaller. v stays Adam's there, and lr gets sqrt(k) and eps 1 / sqrt(k), as
    with the sqrt-sde rule, which is right where noise dominates, as it does in small batches. An update with k > 1
    needs two or more microbatches.

    Scales: for k >= 1, lr by k, with the second moment of the reference; for k < 1, lr by sqrt(k) and eps by 1/sqrt(k);
    betas to beta^k.
    Progress: k.
    Use when: Adam or AdamW with k > 1, while lr * k is so small that one update can replace k.
    Fails when: lr * k is too large, as with the linear rule; layers mix samples; memory for one more copy is missing.
    Source: Wang and Aitchison 2024, arXiv 2402.18824.

    >>> InvariantAdamRule()(RuleInput(batch_size=128, ref_batchsize=64)).scaled_betas((0.5, 0.5))
    (0.25, 0.25)
    """

    needs_squares: ClassVar[bool] = True
    scales_betas: ClassVar[bool] = True

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the factor k on lr, or sqrt(k) below 1, and the power k of the betas."""
        k = update.ratio
        root = min(1.0, k) ** 0.5
        return Scaling(lr=k if k > 1 else root, eps=1 / root, beta1_power=k, beta2_power=k, progress=k)
