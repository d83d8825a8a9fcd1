"""PyTorch training whose global batch size changes from one update to the next."""

from variable_batch_size.agreement import broadcast_parameters
from variable_batch_size.backend import Backend, DistributedBackend, LocalBackend, World, XlaBackend, detect
from variable_batch_size.optimizer import CustomOptimizer
from variable_batch_size.plan import Microbatch
from variable_batch_size.rule_optimizers import (
    ConstantOptimizer,
    LEGWRuleOptimizer,
    LinearRuleMomentumOptimizer,
    LinearRuleOptimizer,
    RootRuleOptimizer,
    SqrtSDERuleOptimizer,
)
from variable_batch_size.rules import (
    ConstantRule,
    ConstantTimescale,
    LEGWRule,
    LinearMomentumRule,
    LinearRule,
    RootRule,
    Rule,
    RuleInput,
    Scaling,
    SqrtSDERule,
)
from variable_batch_size.sampler import CustomSampler
from variable_batch_size.trace import BatchTrace
from variable_batch_size.tracker import Tracker

__all__ = [
    "Backend",
    "BatchTrace",
    "ConstantOptimizer",
    "ConstantRule",
    "ConstantTimescale",
    "CustomOptimizer",
    "CustomSampler",
    "DistributedBackend",
    "LEGWRule",
    "LEGWRuleOptimizer",
    "LinearMomentumRule",
    "LinearRule",
    "LinearRuleMomentumOptimizer",
    "LinearRuleOptimizer",
    "LocalBackend",
    "Microbatch",
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
    "broadcast_parameters",
    "detect",
]
