"""Who computes what: the split of each batch into microbatches, and the sampler that deals them to the ranks."""

from typing import TYPE_CHECKING

from variable_batch_size._lazy import lazy_index

if TYPE_CHECKING:
    from variable_batch_size.data.evaluation_sampler import EvaluationSampler as EvaluationSampler
    from variable_batch_size.data.plan import Plan as Plan
    from variable_batch_size.data.sampler import CustomSampler as CustomSampler
    from variable_batch_size.microbatching import Microbatch as Microbatch
else:
    __getattr__, __dir__, __all__ = lazy_index(__name__, __file__)
