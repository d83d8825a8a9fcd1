"""Scale Adam's hyperparameters such that it follows the same stochastic differential equation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from variable_batch_size.rules.base import RuleContext, RuleInput, Scaling, check_second_moment


@final
@dataclass(frozen=True, slots=True)
class SqrtSDERule:
    """Scale Adam's or RMSprop's hyperparameters by k = B / ref_batchsize: lr * sqrt(k), (1 - beta) * k, eps / sqrt(k).

    The optimizer follows the same stochastic differential equation, whose time is counted in samples, so its averages
    reach as many samples back as at the reference. RMSprop's alpha is the beta here; its momentum, which the paper does
    not use, stays.

    Scales: lr by sqrt(k), 1 - beta by k, eps by 1/sqrt(k).
    Progress: k.
    Use when: Adam, AdamW or RMSprop while noise dominates the gradient, as for a small GPT on spot machines.
    Fails when: batches are so large that noise no longer dominates; k > 1/(1 - beta) raises.
    Source: Malladi et al. 2022, arXiv 2205.10287, section 5.
    """

    scales_betas: ClassVar[bool] = True

    def check(self, context: RuleContext) -> None:
        """Check the inner optimizer and its betas.

        Raises:
            TypeError: unless the inner optimizer is Adam, AdamW or RMSprop, or a subclass.
            ValueError: if the largest batch size of the trace takes a beta out of [0, 1).
        """
        check_second_moment(self, context)
        if context.ref_batchsize is not None:
            _check_betas(context, context.ref_batchsize)

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the factors sqrt(k) on lr, k on 1 - beta and 1 / sqrt(k) on eps."""
        root = update.ratio**0.5
        return Scaling(lr=root, one_minus_beta=update.ratio, eps=1 / root, progress=update.ratio)


def _check_betas(context: RuleContext, reference: int) -> None:
    """Raise ValueError if 1 - k (1 - beta) is below 0 for a beta, where the largest batch is k times `reference`."""
    name = "alpha" if "RMSprop" in context.optimizer else "betas"
    beta = min(float(beta) for group in context.groups for beta in _as_tuple(group[name]))
    k = context.max_batch_size / reference
    scaled = Scaling(one_minus_beta=k).scaled_beta(beta)
    if scaled < 0:
        largest = int(reference / (1 - beta))
        if Scaling(one_minus_beta=(largest + 1) / reference).scaled_beta(beta) >= 0:
            largest += 1  # rounding of beta has taken one sample too many off
        size, least = context.max_batch_size, 1 - 1 / k
        raise ValueError(
            f"every beta must stay in [0, 1), but the largest batch size {size} with k = B / ref_batchsize = {k:g} "
            f"takes {beta:g} of {name} to {scaled:g}; limit the batch sizes to {largest}, or choose a beta >= {least:g}"
        )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
