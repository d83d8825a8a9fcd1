"""PyTorch training whose global batch size changes from one update to the next."""

from variable_batch_size.backend import Backend, DistributedBackend, LocalBackend, World, XlaBackend, detect
from variable_batch_size.checkpoint import Checkpoint
from variable_batch_size.data.fit import Fit, find_minibatch_size, fit
from variable_batch_size.data.plan import Microbatch
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.metrics import Accumulator
from variable_batch_size.optim.consistency import broadcast_parameters
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
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.preemption import Preemption
from variable_batch_size.rules.base import (
    AdamScaleRule,
    AdaScaleRule,
    ConstantRule,
    ConstantTimescale,
    LEGWRule,
    LinearMomentumRule,
    LinearRule,
    Noise,
    RootRule,
    Rule,
    RuleInput,
    Scaling,
    SqrtSDERule,
    adascale_gain,
)
from variable_batch_size.trace.batch_trace import BatchTrace
from variable_batch_size.tracker import Tracker

__all__ = [
    "Accumulator",
    "AdaScaleOptimizer",
    "AdaScaleRule",
    "AdamScaleOptimizer",
    "AdamScaleRule",
    "Backend",
    "BatchTrace",
    "Checkpoint",
    "ConstantOptimizer",
    "ConstantRule",
    "ConstantTimescale",
    "CustomOptimizer",
    "CustomSampler",
    "DistributedBackend",
    "Fit",
    "LEGWRule",
    "LEGWRuleOptimizer",
    "LinearMomentumRule",
    "LinearRule",
    "LinearRuleMomentumOptimizer",
    "LinearRuleOptimizer",
    "LocalBackend",
    "Microbatch",
    "Noise",
    "Preemption",
    "ProgressScheduler",
    "RootRule",
    "RootRuleOptimizer",
    "Rule",
    "RuleInput",
    "Scaling",
    "SqrtSDERule",
    "SqrtSDERuleOptimizer",
    "Tracker",
    "World",
    "XlaBackend",
    "adascale_gain",
    "broadcast_parameters",
    "detect",
    "find_minibatch_size",
    "fit",
]
