"""Find modules of DistributedDataParallel that reduce the same gradients: they would be reduced twice."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import final
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from variable_batch_size.optim.instances import instances
from variable_batch_size.optim.uncompiled import uncompiled

REDUCED_TWICE = (
    "gradients must be reduced once, by optimizer.step(), but the model is wrapped in DistributedDataParallel, which "
    "reduces them too; train the bare module (model.module), or switch the reduction of the wrapper off by "
    "model.require_backward_grad_sync = False"
)

_found: WeakSet[DistributedDataParallel] = WeakSet()  # all instances in this process, also of subclasses


@final
class DataParallelCheck:
    """Checks that no DistributedDataParallel has reduced the gradients of an optimizer.

    Accepted are instances whose own reduction is off: within `no_sync()`, and with `require_backward_grad_sync=False`.
    """

    def __init__(self) -> None:
        self._others: WeakSet[DistributedDataParallel] = WeakSet()  # that have none of the parameters
        self._parameters = 0  # number of parameters for which they were found

    def check(self, parameters: Sequence[Tensor]) -> None:
        """Check it before each microbatch is counted; cheap unless there are such modules.

        Raises:
            RuntimeError: if a DistributedDataParallel with one of the parameters reduced in its last forward and
                backward.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return  # DistributedDataParallel cannot be constructed without a process group
        _observe()
        if len(parameters) != self._parameters:
            self._others, self._parameters = WeakSet(), len(parameters)
        for module in list(_found):
            # The second flag tells whether the last forward has prepared a reduction: no_sync() may be over by now.
            if module.require_backward_grad_sync and module.require_forward_param_sync and module not in self._others:
                if not {*map(id, parameters)}.isdisjoint(map(id, module.parameters())):
                    raise RuntimeError(REDUCED_TWICE)
                self._others.add(module)


@functools.cache
def _observe() -> None:
    """Find all instances that exist, and from now on each one when it gets its module."""
    register_module_module_registration_hook(_add)
    _found.update(instances(DistributedDataParallel))


@uncompiled
def _add(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        _found.add(module)
