"""Helpers for tests of training: ranks, XLA cores on a CPU, resuming, gradients, losses and schedules.

Begin with `gradient.py`: it explains the gradient of any training loop by gradients of rows.
"""

from variable_batch_size.backend.xla import launch
from variable_batch_size.testing.gradient import GradientReport, check_gradient
from variable_batch_size.testing.loss import check_loss
from variable_batch_size.testing.ranks import ThreadBackend, run_ranks
from variable_batch_size.testing.resuming import assert_resumes_identically
from variable_batch_size.testing.schedules import check_schedule

__all__ = [
    "GradientReport",
    "ThreadBackend",
    "assert_resumes_identically",
    "check_gradient",
    "check_loss",
    "check_schedule",
    "launch",
    "run_ranks",
]
