"""PyTorch training whose global batch size changes from one update to the next."""

from typing import TYPE_CHECKING

from variable_batch_size._lazy import lazy_index

__version__ = "0.1.0"

if TYPE_CHECKING:
    from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace as AdaptiveTrace
    from variable_batch_size.backend import Backend as Backend
    from variable_batch_size.backend import DistributedBackend as DistributedBackend
    from variable_batch_size.backend import LocalBackend as LocalBackend
    from variable_batch_size.backend import XlaBackend as XlaBackend
    from variable_batch_size.backend import detect as detect
    from variable_batch_size.checkpoint import Checkpoint as Checkpoint
    from variable_batch_size.checkpoint import read_checkpoint as read_checkpoint
    from variable_batch_size.data import CustomSampler as CustomSampler
    from variable_batch_size.data import EvaluationSampler as EvaluationSampler
    from variable_batch_size.data import Microbatch as Microbatch
    from variable_batch_size.data.fit import Elastic as Elastic
    from variable_batch_size.data.fit import Fit as Fit
    from variable_batch_size.data.fit import elastic as elastic
    from variable_batch_size.data.fit import find_minibatch_size as find_minibatch_size
    from variable_batch_size.data.fit import fit as fit
    from variable_batch_size.metrics import Accumulator as Accumulator
    from variable_batch_size.optim import AdamScaleOptimizer as AdamScaleOptimizer
    from variable_batch_size.optim import AdaScaleOptimizer as AdaScaleOptimizer
    from variable_batch_size.optim import ConstantOptimizer as ConstantOptimizer
    from variable_batch_size.optim import CustomOptimizer as CustomOptimizer
    from variable_batch_size.optim import LEGWRuleOptimizer as LEGWRuleOptimizer
    from variable_batch_size.optim import LinearRuleMomentumOptimizer as LinearRuleMomentumOptimizer
    from variable_batch_size.optim import LinearRuleOptimizer as LinearRuleOptimizer
    from variable_batch_size.optim import ProgressScheduler as ProgressScheduler
    from variable_batch_size.optim import RootRuleOptimizer as RootRuleOptimizer
    from variable_batch_size.optim import SqrtSDERuleOptimizer as SqrtSDERuleOptimizer
    from variable_batch_size.optim import broadcast_parameters as broadcast_parameters
    from variable_batch_size.optim import check_model as check_model
    from variable_batch_size.optim import remaining_epochs as remaining_epochs
    from variable_batch_size.optim import updates as updates
    from variable_batch_size.preemption import Preemption as Preemption
    from variable_batch_size.rules import *  # noqa: F403
    from variable_batch_size.trace import BatchTrace as BatchTrace
    from variable_batch_size.tracker import Tracker as Tracker
    from variable_batch_size.world import World as World
else:
    __getattr__, __dir__, __all__ = lazy_index(__name__, __file__)
