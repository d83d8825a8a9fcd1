"""`CustomOptimizer` with a rule filled in: one short class for each."""

from __future__ import annotations

from typing import Any, final

from torch.optim import SGD, Optimizer

from variable_batch_size.optimizer import CustomOptimizer
from variable_batch_size.rules import (
    AdamScaleRule,
    AdaScaleRule,
    ConstantRule,
    LinearMomentumRule,
    LinearRule,
    RootRule,
)
from variable_batch_size.sampler import CustomSampler


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
