"""`CustomOptimizer` with a rule filled in: one short class for each."""

from __future__ import annotations

from typing import Any, final

from torch.optim import SGD, Adam, Optimizer, RMSprop

from variable_batch_size._validation import check_number
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.scaling import moved_beta
from variable_batch_size.rules.base import (
    AdamScaleRule,
    AdaScaleRule,
    ConstantRule,
    LEGWRule,
    LinearMomentumRule,
    LinearRule,
    RootRule,
    SqrtSDERule,
)


@final
class ConstantOptimizer(CustomOptimizer):
    """Leaves the learning rate as it is, whatever the batch size. Arguments: see `CustomOptimizer`."""

    def __init__(self, inner: Optimizer, sampler: CustomSampler, **options: Any) -> None:
        super().__init__(inner, sampler, rule=ConstantRule(), **options)


@final
class LinearRuleOptimizer(CustomOptimizer):
    """lr * B / ref_batchsize (Goyal et al. 2017, arXiv 1706.02677). Arguments: see `CustomOptimizer`."""

    def __init__(self, inner: Optimizer, sampler: CustomSampler, ref_batchsize: int, **options: Any) -> None:
        super().__init__(inner, sampler, ref_batchsize, rule=LinearRule(), **options)


@final
class RootRuleOptimizer(CustomOptimizer):
    """lr * sqrt(B / ref_batchsize) (Krizhevsky 2014, arXiv 1404.5997). Arguments: see `CustomOptimizer`."""

    def __init__(self, inner: Optimizer, sampler: CustomSampler, ref_batchsize: int, **options: Any) -> None:
        super().__init__(inner, sampler, ref_batchsize, rule=RootRule(), **options)


@final
class LinearRuleMomentumOptimizer(CustomOptimizer):
    """u = m u + (B / ref_batchsize) (G + decay w), w -= lr u, for SGD. Arguments: see `CustomOptimizer`.

    The linear rule as it acts inside the velocity: what a gradient adds keeps the size that its own batch gave it.
    """

    def __init__(self, inner: Optimizer, sampler: CustomSampler, ref_batchsize: int, **options: Any) -> None:
        if not isinstance(inner, SGD):
            raise TypeError(
                f"LinearRuleMomentumOptimizer scales what enters SGD's velocity, so its inner optimizer must be "
                f"torch.optim.SGD, got {type(inner).__name__}; use LinearRuleOptimizer"
            )
        super().__init__(inner, sampler, ref_batchsize, rule=LinearMomentumRule(), **options)


@final
class SqrtSDERuleOptimizer(CustomOptimizer):
    """lr * sqrt(k), (1 - beta) * k, eps / sqrt(k) with k = B / ref_batchsize, for Adam, AdamW and RMSprop.

    Malladi et al. 2022, arXiv 2205.10287, section 5. Adam's bias correction goes by the betas that were used, not by
    the present one; for this a hook of the inner step finds lr, eps and a decoupled decay moved a little further.
    RMSprop's alpha is the beta here, and its momentum, which the paper does without, stays. Arguments: see
    `CustomOptimizer`.

    Raises:
        ValueError: besides the others, when the largest batch size of the trace takes a beta out of [0, 1).
    """

    def __init__(self, inner: Optimizer, sampler: CustomSampler, ref_batchsize: int, **options: Any) -> None:
        if not isinstance(inner, (Adam, RMSprop)):
            raise TypeError(
                f"SqrtSDERuleOptimizer scales the betas of adaptive optimizers, so its inner optimizer must be a "
                f"torch.optim.Adam, AdamW or RMSprop, got {type(inner).__name__}; use RootRuleOptimizer, or "
                f"LinearRuleOptimizer for SGD"
            )
        super().__init__(inner, sampler, ref_batchsize, rule=SqrtSDERule(), **options)
        self._check_betas(sampler.plan.trace.max_batch_size)

    def _check_betas(self, largest: int) -> None:
        reference = self.ref_batchsize or 1
        names = "alpha" if isinstance(self.inner, RMSprop) else "betas"
        beta = min(float(beta) for group in self.param_groups for beta in _several(group[names]))
        k = largest / reference
        if moved_beta(beta, k) < 0:
            fitting = int(reference / (1 - beta))
            fitting += moved_beta(beta, (fitting + 1) / reference) >= 0  # by the rounding of beta
            raise ValueError(
                f"every beta must stay in [0, 1) when 1 - beta is multiplied by k = B / ref_batchsize, but the largest "
                f"batch size is {largest}, where k = {k:g} takes {beta:g} of {names} to {moved_beta(beta, k):g}; cut "
                f"the batch sizes to at most {fitting}, or choose a beta of at least {1 - 1 / k:g}"
            )


@final
class LEGWRuleOptimizer(CustomOptimizer):
    """lr * sqrt(B / ref_batchsize) * min(1, u / U) at update u = 1, 2, ...: LEGW (You et al. 2019, arXiv 1901.08256).

    The warm-up's length in epochs is proportional to the batch size, so it takes
    U = warmup_epochs * dataset_size / ref_batchsize updates whatever the trace does; only after it is the factor at
    `ref_batchsize` 1. Leave out a warm-up of your own.

    Args:
        inner: see `CustomOptimizer`, as for all that is not named here.
        sampler: its dataset's size says how long an epoch is.
        ref_batchsize: samples an update at which the learning rate and the warm-up were tuned.
        warmup_epochs: the warm-up's length at `ref_batchsize`; 0 for none.
        **options: those of `CustomOptimizer`.

    Raises:
        ValueError: besides the others, when warmup_epochs is no finite number >= 0.
    """

    def __init__(
        self, inner: Optimizer, sampler: CustomSampler, ref_batchsize: int, *, warmup_epochs: float, **options: Any
    ) -> None:
        epochs = check_number(warmup_epochs, "warmup_epochs", "pass the warm-up's length at ref_batchsize, 0 for none")
        super().__init__(inner, sampler, ref_batchsize, rule=LEGWRule(0), **options)  # which checks the arguments
        self._updater.rule = LEGWRule(epochs * sampler.plan.dataset_size / (self.ref_batchsize or 1))


@final
class AdaScaleOptimizer(CustomOptimizer):
    """lr * gain, gain = (sigma^2 / ref + mu^2) / (sigma^2 / B + mu^2) (Johnson et al. 2020, arXiv 2007.05105).

    Arguments: see `CustomOptimizer`. `progress` grows by the gain, in updates at `ref_batchsize`, and a schedule that
    was written for `ref_batchsize` is read there (`ProgressScheduler`). An update of a single microbatch gives no
    estimate: choose `minibatch_size` so that most updates have at least two microbatches, over all ranks.

    What differs from the paper, section 3 and appendix B:
    - k = B / ref may be any number, also below 1, and may change at every update; sigma^2 and mu^2 are those of one
      sample, so that nothing is rescaled then.
    - Groups are microbatches, of unequal size, and not workers: the gain does not depend on the world.
    - The averages reach over 1000 reference updates (theta = 1 - k / 1000) whatever k is, contain the update's own
      microbatches and are debiased; sigma^2 and mu^2 are averaged before they are divided.
    - Until there is a first estimate the gain is 1.
    """

    def __init__(self, inner: Optimizer, sampler: CustomSampler, ref_batchsize: int, **options: Any) -> None:
        super().__init__(inner, sampler, ref_batchsize, rule=AdaScaleRule(), **options)


@final
class AdamScaleOptimizer(CustomOptimizer):
    """lr * sqrt(gain), for Adam and its like, with AdaScale's gain (Qiao et al. 2021, arXiv 2008.12260).

    Arguments: see `CustomOptimizer`. The gain is that of the plain gradients, before Adam divides them; `progress`
    grows by it. Everything else is as for `AdaScaleOptimizer`.
    """

    def __init__(self, inner: Optimizer, sampler: CustomSampler, ref_batchsize: int, **options: Any) -> None:
        super().__init__(inner, sampler, ref_batchsize, rule=AdamScaleRule(), **options)


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
