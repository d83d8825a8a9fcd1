"""Forwards and backwards that are none of a training: a probe, a penalty that is logged, an estimate of a Hessian."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from variable_batch_size.backend.generators import kept_states
from variable_batch_size.data.steps import Phase
from variable_batch_size.data.training import Training


@contextmanager
def outside(training: Training) -> Iterator[None]:
    """Let nothing count, between two steps, and put the gradients back; see `CustomOptimizer.outside`."""
    training.check_phase("outside()", Phase.BETWEEN_STEPS)
    training.finish_update()
    members = list(training.members)
    if any(member._updater.sum.has_uncounted for member in members):
        raise RuntimeError(
            "outside() must be entered between two steps, but a backward() has come that no step() has counted; enter "
            "it after step(), or call optimizer.zero_grad() first"
        )
    kept: dict[Tensor, Tensor | None] = {}
    with ExitStack() as stack:
        if training.batches.reproducible:  # whose microbatches are seeded when they are handed out
            stack.enter_context(kept_states())
        for member in members:  # parameters of a model may be in no sum
            module = member._abilities.module
            if isinstance(module, DistributedDataParallel):  # which would send its buffers
                stack.callback(setattr, module, "require_forward_param_sync", module.require_forward_param_sync)
                module.require_forward_param_sync = False
            for parameter in chain(member._abilities.parameters_of_model, member._updater.parameters):
                kept.setdefault(parameter, parameter.grad)
                parameter.grad = None
        training.phase = Phase.OUTSIDE
        try:
            yield
        finally:
            training.phase = Phase.BETWEEN_STEPS
            for member in members:
                member._updater.sum.clear()
            for parameter, gradient in kept.items():
                parameter.grad = gradient
