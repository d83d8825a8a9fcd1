"""Forwards and backwards that are none of a training: a probe, a penalty that is logged, an estimate of a Hessian."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain

from torch import Tensor

from variable_batch_size.backend.generators import kept_states
from variable_batch_size.data.steps import Phase
from variable_batch_size.data.training import Training


@contextmanager
def outside(training: Training) -> Iterator[None]:
    """Let nothing count, between two steps, and put the gradients back; see `CustomOptimizer.outside`."""
    training.check_phase("outside()", Phase.BETWEEN_STEPS)
    training.go_on()
    members = list(training.members)
    kept: dict[Tensor, Tensor | None] = {}
    with ExitStack() as stack:
        for member in members:
            stack.enter_context(member._updater.sum.outside())
        if training.batches.reproducible:  # whose microbatches are seeded when they are handed out
            stack.enter_context(kept_states())
        for member in members:  # parameters of a model may be in no sum
            for parameter in chain(member._abilities.parameters_of_model, member._updater.parameters):
                kept.setdefault(parameter, parameter.grad)
                parameter.grad = None
        training.phase = Phase.OUTSIDE
        try:
            yield
        finally:
            training.phase = Phase.BETWEEN_STEPS
            for parameter, gradient in kept.items():
                parameter.grad = gradient
