"""A DistributedDataParallel with a communication hook of the user sums: each loss carries its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.optim.accumulation import Aside
from variable_batch_size.optim.ddp_sync import check_forward, check_members, check_ranks, reset
from variable_batch_size.optim.replay import call_before_forward
from variable_batch_size.optim.sync import Sync


@final
class HookedDDPSync(Sync):
    """A DistributedDataParallel with a communication hook of the user sums: each loss carries its weight.

    The hook averages over the ranks, as those of torch do, so that the weights are multiplied by their number.
    """

    in_backward = True
    loss_weighed = "a communication hook of DistributedDataParallel"

    def __init__(self, backend: Backend, module: DistributedDataParallel) -> None:
        super().__init__(backend)
        check_ranks(module, backend)
        self.module: DistributedDataParallel = module
        self._begins = False  # whether a forward begins
        self._forward = False  # whether that of the last microbatch has begun
        call_before_forward(module, self._begin)

    def _begin(self) -> None:
        self._begins = True

    def use(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of these parameters from now on, all of the optimizer.

        Raises:
            ValueError: if one is not in the module, or the gradients of single microbatches are needed.
        """
        check_members(self.module, parameters)
        if self.measures:
            raise ValueError(
                "a rule or a controller that reads the gradient noise needs a DistributedDataParallel without a "
                "communication hook, because one takes the squares, but model= has one; create it without "
                "register_comm_hook()"
            )

    def before(self, *, last: bool, weight: float, aside: Aside) -> None:
        """Switch the reduction on before the last microbatch, and off before all others."""
        self.module.require_backward_grad_sync = last
        self._forward |= last and self._begins  # optimizer.backward() comes here, too
        self._begins = False

    def loss_weight(self, samples: float, batch_size: int) -> float:
        """Return by what the loss of a microbatch is multiplied, if the ranks average."""
        return self._backend.world.size * samples / batch_size

    def sum(self, gradients: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Sum what travels with the gradients, which `backward()` has summed.

        Raises:
            RuntimeError: if it has not.
        """
        check_forward(self._forward)
        if self.loss_scale is not None and gradients:
            torch._foreach_div_(list(gradients), self.loss_scale)
        if others:
            self._all_reduce(others)

    def clear(self) -> None:
        """Forget the step, after its update or to start it over."""
        super().clear()
        self._forward = False

    def prepare_discard(self, agreement: Agreement | None, timeout: float) -> None:
        """Check that all ranks discard the step: buckets that have left cannot be called back."""
        assert agreement is not None  # the optimizer has created it
        agreement.gather("discard_step()", "", timeout)
        reset(self.module)
