"""DistributedDataParallel averages the gradients of a step in the last `backward()` of this rank.

Its reduction is off but in the last microbatch of this rank, in which `.grad` holds the earlier ones, too. Each loss is
multiplied by W n_j / B, so that the average over the W ranks, by torch's own reducer or a communication hook of the
user, is the gradient of the update, although ranks have different numbers of microbatches.
"""

from __future__ import annotations

from typing import Any, final

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from variable_batch_size.backend import Backend, DistributedBackend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.data.batches import Batch
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.stage import MeasuredSquares
from variable_batch_size.optim.sums.in_backward import InBackward
from variable_batch_size.optim.sums.ranks import Ranks
from variable_batch_size.optim.tensors.arithmetic import is_narrow
from variable_batch_size.optim.tensors.parameters import Gradients, Parameters

_ELSEWHERE = "call model.module for another optimizer's loss"


@final
class DDP(InBackward):
    """A DistributedDataParallel averages in the last `backward()` of a step."""

    wrapper = "a DistributedDataParallel"

    def __init__(
        self,
        ranks: Ranks,
        parameters: Parameters,
        agreement: Agreement,
        module: DistributedDataParallel,
        **options: Any,
    ) -> None:
        _check_ranks(module, ranks.backend)
        self.module: DistributedDataParallel = module
        message = (
            "the DistributedDataParallel that is passed as model= must have all parameters of the optimizer, but {} is "
            "not in it; put all of them in one module, and wrap that"
        )
        self._check_members(parameters, module.parameters(), message)
        buckets = module.reducer._get_zeros_like_grad_buckets()  # private: the only list of what the reducer averages
        averaged = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
        # Numbers of the optimizer's parameters that the module does not average, such as frozen ones.
        self._left_out = [number for number, parameter in enumerate(parameters) if id(parameter) not in averaged]
        self._narrow = any(map(is_narrow, parameters))
        super().__init__(ranks, parameters, agreement, **options)

    def _begin_step(self) -> None:
        super()._begin_step()
        self._of_forward: Microbatch | None = None  # the microbatch whose forward pass has begun
        # The gradients when that forward pass began, if its backward() is the one that averages over the ranks: what
        # changes them in between would be averaged, too.
        self._at_forward: Gradients | None = None
        self._averaged = False  # whether that backward() has run: the step is complete on this rank

    def prepare(self, microbatch: Microbatch | None, *, forward: bool = False) -> None:
        """Let the DistributedDataParallel average in the last `backward()` of this rank in a step, and in no other.

        `microbatch`: the next one; None if the forward pass is of anything else. `forward`: whether one begins now.
        """
        super().prepare(microbatch, forward=forward)
        if not forward:
            return
        is_last = microbatch is not None and microbatch.ends_step  # of this rank in the step
        self._check_module(several=microbatch is not None and not is_last)
        self.module.require_backward_grad_sync = is_last and not self._averaged
        if self._of_forward != microbatch:  # the first of several forward passes of a microbatch
            self._of_forward = microbatch
            self._at_forward = Gradients.of(self.parameters) if is_last else None

    def _check_module(self, *, several: bool) -> None:
        """Raise RuntimeError if the settings of the module do not allow the forward pass of a microbatch.

        `several`: whether other microbatches of this rank follow in the step.
        """
        if self.module._join_config.enable:  # private: there is no other way to see it
            raise RuntimeError(
                "ranks must make every update together, but the DistributedDataParallel is within its join(); leave it "
                "out: the sampler deals each rank its microbatches, and a rank without a share repeats one"
            )
        if several and self.module.static_graph:
            raise RuntimeError(
                "a DistributedDataParallel with static_graph=True must sum in each backward(), but a step has several "
                "microbatches on this rank; create it without static_graph"
            )
        if several and self._narrow:
            raise RuntimeError(
                "several microbatches need at least 32 bits, but some parameters of the DistributedDataParallel have "
                "fewer; keep them in float32, with torch.autocast, or pass a minibatch_size for one microbatch a step"
            )

    def _loss_factor(self, microbatch: Microbatch) -> float:
        """Return W n_j / B, because the module divides the sum over the W ranks by W."""
        return self._backend.world.size * microbatch.samples / self._divisor(microbatch)

    def _before_backward(self, microbatch: Microbatch) -> None:
        """Raise RuntimeError if the module would not sum in the last backward of the step, or in another one."""
        super()._before_backward(microbatch)
        if self._averaged:
            raise RuntimeError(
                "a DistributedDataParallel averages in the last backward() of a step, but there is another one; add "
                "the losses of a microbatch and call optimizer.backward() once"
            )
        if self._of_forward != microbatch:
            raise RuntimeError(
                "a DistributedDataParallel cannot sum, because it was not called after the last step(); call it (not "
                "its .module), then optimizer.backward() and step(), before the next microbatch"
            )
        if self.module.require_backward_grad_sync != microbatch.ends_step:
            raise RuntimeError(
                "a DistributedDataParallel must sum in the last microbatch of a step, but another optimizer, or the "
                "loop, has switched its reduction; train a parameter by one optimizer, and delete those before it"
            )

    def _after_backward(self, microbatch: Microbatch, factor: float) -> None:
        """After the last backward of the step, check that the module has summed all of its gradients."""
        super()._after_backward(microbatch, factor)
        if self._at_forward is not None:
            self._averaged = microbatch.ends_step
            try:  # private: torch itself checks this only in the next forward, which would name another cause
                self.module.reducer._check_reducer_finalized()
            except RuntimeError as error:
                raise RuntimeError(
                    "a DistributedDataParallel must get gradients for all its parameters in the last backward() of a "
                    "step, but it got only some; create it with find_unused_parameters=True"
                ) from error

    def _measure(self, microbatch: Microbatch, *, counted: bool) -> MeasuredSquares:
        """Check that the loss of a microbatch has carried its weight in the step, and return the gradient's squares."""
        fresh = self._check.find_fresh()  # for each parameter, whether its gradient has changed
        factor = self._check_carried(fresh, needed=microbatch.samples > 0)  # 0 samples: a replay, with weight 0
        # The last backward() also gives this rank the gradients of parameters that others have used.
        return self._take_squares(microbatch, () if microbatch.ends_step else fresh, factor)

    def _reduce(self, batch: Batch, factor: float | None) -> list[Tensor]:
        """Sum the message over the ranks, and multiply the gradients, which `backward()` has averaged, by `factor`."""
        for number in self._left_out:
            if self.parameters[number].grad is not None:
                raise RuntimeError(
                    f"the DistributedDataParallel leaves out parameter {number}, of shape "
                    f"{tuple(self.parameters[number].shape)}, which was frozen when it was created, or is ignored; "
                    "create it, and the optimizer, after requires_grad_(True)"
                )
        return self._scale_and_sum_message(batch, factor)[0]

    def _clear_uncounted(self) -> None:
        """Clear the gradients that have come since the last `add`; raise RuntimeError if ranks may have summed them."""
        before, now = self._at_forward, Gradients.of(self.parameters)
        last_backward_has_begun = before is not None and before.versions != now.versions
        if self._averaged or last_backward_has_begun:
            raise RuntimeError(
                f"zero_grad() would drop sums of a DistributedDataParallel, which all ranks must use; "
                f"remove it, or {_ELSEWHERE}; after an exception discard_step() on all ranks"
            )
        super()._clear_uncounted()

    def _expect_forward(self) -> None:
        """After an exception, let the module expect no gradients of the interrupted forward pass, if torch can."""
        getattr(self.module.reducer, "_reset_state", lambda: None)()  # private, and not in every version


def _check_ranks(module: DistributedDataParallel, backend: Backend) -> None:
    """Raise ValueError unless a module averages over the same ranks as the optimizer, which its backend has."""
    ranks = dist.get_process_group_ranks(module.process_group)
    expected = backend.ranks if isinstance(backend, DistributedBackend) else [*range(backend.world.size)]
    if ranks != expected:
        raise ValueError(
            f"model= must be a DistributedDataParallel over the ranks that share a batch, but it has ranks {ranks} and "
            f"the optimizer {expected}; pass the same process_group to both"
        )
