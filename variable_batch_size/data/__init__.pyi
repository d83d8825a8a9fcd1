from .evaluation_sampler import EvaluationSampler as EvaluationSampler
from .plan.plan import Plan as Plan
from .sampler import CustomSampler as CustomSampler
