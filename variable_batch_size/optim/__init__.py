"""From the gradients of microbatches to an update: accumulation, reduction, gradient noise, scaling, the inner step."""

from variable_batch_size.optim.consistency import broadcast_parameters
from variable_batch_size.optim.epochs import remaining_epochs
from variable_batch_size.optim.lr_scheduler import ProgressScheduler
from variable_batch_size.optim.named import (
    AdamScaleOptimizer,
    AdaScaleOptimizer,
    ConstantOptimizer,
    LEGWRuleOptimizer,
    LinearRuleMomentumOptimizer,
    LinearRuleOptimizer,
    RootRuleOptimizer,
    SqrtSDERuleOptimizer,
)
from variable_batch_size.optim.normalization import check_model
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.updates import updates

__all__ = [
    "AdaScaleOptimizer",
    "AdamScaleOptimizer",
    "ConstantOptimizer",
    "CustomOptimizer",
    "LEGWRuleOptimizer",
    "LinearRuleMomentumOptimizer",
    "LinearRuleOptimizer",
    "ProgressScheduler",
    "RootRuleOptimizer",
    "SqrtSDERuleOptimizer",
    "broadcast_parameters",
    "check_model",
    "remaining_epochs",
    "updates",
]
