"""Forwards and backwards that are none of a training: a probe, a penalty that is logged, an estimate of a Hessian."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

from torch.nn import Parameter

from variable_batch_size.backend.generators import kept_states
from variable_batch_size.data.steps import Phase
from variable_batch_size.data.training import Training
from variable_batch_size.optim.sums.base import Sum


@contextmanager
def outside(training: Training, sums: Sequence[Sum], of_models: Iterable[Parameter]) -> Iterator[None]:
    """Let nothing count, between two steps, and put the gradients back; see `CustomOptimizer.outside`.

    `of_models` are the parameters of the models, which may be in no sum.
    """
    training.check_phase("outside()", Phase.BETWEEN_STEPS)
    training.go_on()
    with ExitStack() as stack:
        for one in sums:
            stack.enter_context(one.outside())
        if training.batches.reproducible:  # whose microbatches are seeded when they are handed out
            stack.enter_context(kept_states())
        kept = {parameter: parameter.grad for parameter in chain(of_models, *(one.parameters for one in sums))}
        for parameter in kept:
            parameter.grad = None
        training.phase = Phase.OUTSIDE
        try:
            yield
        finally:
            training.phase = Phase.BETWEEN_STEPS
            for parameter, gradient in kept.items():
                parameter.grad = gradient
