"""Forwards and backwards that do not belong to a training: a probe, a logged penalty, an estimate of a Hessian."""

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
    """Keep forward and backward passes within a block out of the training, and restore the gradients after it.

    See `CustomOptimizer.outside`.
    """
    training.check_phase("outside()", Phase.BETWEEN_STEPS)
    training.finish_update()
    members = list(training.members)  # the optimizers of the sampler
    if any(member._updater.sum.has_uncounted for member in members):
        raise RuntimeError(
            "outside() must be entered between two steps, but a backward() has come that no step() has counted; enter "
            "it after step(), or call optimizer.zero_grad() first"
        )
    gradients: dict[Tensor, Tensor | None] = {}  # by parameter: its `.grad` before the block
    with ExitStack() as stack:
        if training.batches.reproducible:  # random numbers of the block must not change the ones that follow
            stack.enter_context(kept_states())
        try:
            for member in members:
                module = member._abilities.module  # None if the optimizer was created without model=
                # The forward of a DistributedDataParallel would send its buffers, where other ranks may call none.
                if isinstance(module, DistributedDataParallel):
                    stack.callback(setattr, module, "require_forward_param_sync", module.require_forward_param_sync)
                    module.require_forward_param_sync = False
                # A model may have parameters that the optimizer does not train; their gradients are restored, too.
                for parameter in chain(member._abilities.parameters_of_model, member._updater.parameters):
                    gradients.setdefault(parameter, parameter.grad)
                    parameter.grad = None
            training.phase = Phase.OUTSIDE
            yield
        finally:
            training.phase = Phase.BETWEEN_STEPS
            for member in members:
                member._updater.sum.clear()
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
