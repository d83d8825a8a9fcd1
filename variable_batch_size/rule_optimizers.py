"""`CustomOptimizer` with a rule filled in: one short class for each."""

from __future__ import annotations

from typing import Any, final

from torch.optim import SGD, Optimizer

from variable_batch_size.optimizer import CustomOptimizer
from variable_batch_size.rules import ConstantRule, LinearMomentumRule, LinearRule, RootRule
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
