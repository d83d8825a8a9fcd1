"""PyTorch training whose global batch size changes from one update to the next."""

from variable_batch_size.agreement import broadcast_parameters
from variable_batch_size.backend import Backend, DistributedBackend, LocalBackend, World, XlaBackend, detect
from variable_batch_size.optimizer import CustomOptimizer
from variable_batch_size.plan import Microbatch
from variable_batch_size.rule_optimizers import (
    ConstantOptimizer,
    LinearRuleMomentumOptimizer,
    LinearRuleOptimizer,
    RootRuleOptimizer,
)
from variable_batch_size.rules import (
    ConstantRule,
    LinearMomentumRule,
    LinearRule,
    RootRule,
    Rule,
    RuleInput,
    Scaling,
)
from variable_batch_size.sampler import CustomSampler
from variable_batch_size.schedules import ProgressScheduler
from variable_batch_size.trace import BatchTrace
from variable_batch_size.tracker import Tracker

__all__ = [
    "Backend",
    "BatchTrace",
    "ConstantOptimizer",
    "ConstantRule",
    "CustomOptimizer",
    "CustomSampler",
    "DistributedBackend",
    "LinearMomentumRule",
    "LinearRule",
    "LinearRuleMomentumOptimizer",
    "LinearRuleOptimizer",
    "LocalBackend",
    "Microbatch",
    "ProgressScheduler",
    "RootRule",
    "RootRuleOptimizer",
    "Rule",
    "RuleInput",
    "Scaling",
    "Tracker",
    "World",
    "XlaBackend",
    "broadcast_parameters",
    "detect",
]
