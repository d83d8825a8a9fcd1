"""Forwards and backwards that are none of a training: a probe, a penalty that is logged, an estimate of a Hessian."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from variable_batch_size.data.steps import Phase
from variable_batch_size.data.training import Training
from variable_batch_size.optim.sums.base import Sum


@contextmanager
def outside(training: Training, sums: Iterable[Sum]) -> Iterator[None]:
    """Let nothing count, between two steps, and put the gradients back; see `CustomOptimizer.outside`."""
    training.check_phase("outside()", Phase.BETWEEN_STEPS)
    training.go_on()
    with ExitStack() as stack:
        for one in sums:
            stack.enter_context(one.outside())
        training.phase = Phase.OUTSIDE
        try:
            yield
        finally:
            training.phase = Phase.BETWEEN_STEPS
