"""DistributedDataParallel sums the gradients of a step while the last `backward()` of this rank runs.

Its reduction is off but in the last microbatch of this rank. There `.grad` holds the earlier ones in units of the last
one's weight; a communication hook gives each bucket this weight, and sums it. So each microbatch weighs as its
samples, although ranks have different numbers of microbatches. The buckets, their overlap with `backward()`, and what
happens to unused parameters are those of DistributedDataParallel.

If the noise is measured, the gradients of earlier microbatches are kept apart from `.grad`, so that a bucket holds
those of the last one alone, and the hook takes their square.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import final
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from variable_batch_size.backend import Backend, DistributedBackend
from variable_batch_size.optim.accumulation import NOTHING, Aside
from variable_batch_size.optim.backward_check import versions
from variable_batch_size.optim.hooks import call_before_forward
from variable_batch_size.optim.sync import RESTART, Sync, Watch
from variable_batch_size.optim.tensors import is_narrow, squared_norm

_ELSEWHERE = "call model.module for another optimizer's loss"


@final
class DDPSync(Sync):
    """A DistributedDataParallel sums in the last `backward()` of a step."""

    in_backward = True

    def __init__(self, backend: Backend, module: DistributedDataParallel) -> None:
        super().__init__(backend)
        check_ranks(module, backend)
        self.module: DistributedDataParallel = module
        self._parameters, self._own = list[Tensor](), set[int]()
        self._aside, self._squares = NOTHING, list[Tensor]()
        self._summed: set[int] = set()  # parameters whose gradients the last backward() has summed, by id
        self._complete = False  # whether these are those of all buckets
        self._forward = False  # whether the forward of the last microbatch has begun
        self._versions: list[int] | None = None  # of the gradients, when they were summed
        self._watch = Watch(backend)
        if module not in _reductions:
            _reductions[module] = _Reduction(module, backend)
        self._reduction = _reductions[module]
        self._number = -1  # from the first forward on, in the order of the optimizers
        self._reduction.syncs.add(self)

    def use(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of these parameters from now on, all of the optimizer."""
        check_members(self.module, parameters)
        self._parameters, self._own = list(parameters), {id(parameter) for parameter in parameters}

    @property
    def replaced(self) -> bool:
        """Whether a later optimizer trains some of its parameters: this one was left, perhaps within a step."""
        others = (other for other in self._reduction.syncs if other._number > self._number >= 0)
        return any(not other._own.isdisjoint(self._own) for other in others)

    def before(self, *, last: bool, weight: float, aside: Aside) -> None:
        """Switch the reduction on before the last microbatch, and off before all others."""
        if self._number < 0:
            self._number = next(_numbers)
        if self.replaced:
            return
        if not last and self.module.static_graph:
            raise RuntimeError(
                "a DistributedDataParallel with static_graph=True must sum in each backward(), but a step has several "
                "microbatches on this rank; create it without static_graph"
            )
        self._forward |= last
        sums = last and not self._summed  # not after the sum
        self.module.require_backward_grad_sync = sums
        if sums:
            self._reduction.weight, self._aside, self._squares, self.last = weight, aside, [], {}
            if self.module.find_unused_parameters:  # it takes a gradient that is missing for one that nobody has
                for parameter in aside.gradients:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)

    def square(self) -> Tensor | None:
        """Return the square of the gradient of the last microbatch, 0-D; None of a replay."""
        return torch.stack(self._squares).sum() if self._squares else None

    def sum(self, gradients: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Sum what travels with the gradients, which `backward()` has summed."""
        self._watch.end()
        if self.replaced:
            raise RuntimeError(
                "a parameter of a DistributedDataParallel must belong to one optimizer, but a later one has it, too; "
                "train with the later one, or delete it"
            )
        check_forward(self._forward)
        if not self._complete:
            raise RuntimeError(
                f"a DistributedDataParallel must get gradients for all its parameters in the last backward() of a "
                f"step, but it got {'only some' if self._summed else 'too few to sum any'}; create it with "
                f"find_unused_parameters=True"
            )
        if self._versions != versions(self._parameters):
            raise RuntimeError(
                f"the sums of a DistributedDataParallel must stay as they are until step(), but something has changed "
                f"them; add the losses of a microbatch and call backward() once, clip with max_grad_norm=, and "
                f"{_ELSEWHERE}"
            )
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None and id(parameter) not in self._summed:
                raise RuntimeError(
                    f"a DistributedDataParallel must sum all gradients, but it leaves out that of parameter {number}, "
                    f"of shape {tuple(parameter.shape)}, which was frozen when it was created, or is ignored; create "
                    f"it, and the optimizer, after requires_grad_(True)"
                )
        if others:
            self._all_reduce(others)

    def reset(self) -> None:
        """Let the module expect no gradients of an earlier forward."""
        reset(self.module)

    def restart(self) -> None:
        """Forget what an exception has interrupted: every rank loads a state."""
        super().restart()
        self.reset()

    def clear(self) -> None:
        """Forget the step, after its update or to start it over."""
        super().clear()
        self._watch.end()
        self._summed, self._complete, self._forward, self._versions = set(), False, False, None
        self._aside, self._squares = NOTHING, []

    def drop(self) -> None:
        """Check that no rank has summed gradients that this one forgets."""
        if self._summed:
            raise RuntimeError(
                f"the sums of a DistributedDataParallel must be used on all ranks, but zero_grad() would drop them on "
                f"this one; {_ELSEWHERE}, and after an exception call discard_step() on all ranks"
            )

    # The hook of the module asks for these. ----------------------------------------------------------------------

    def measure(self, members: Sequence[tuple[Tensor, Tensor]], *, last: bool) -> None:
        """Take the square of the last microbatch."""
        self._complete |= last
        if last:  # after what DistributedDataParallel does at the end of backward()
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._note))
        self._summed.update(id(parameter) for parameter, _ in members)
        if members[0][0].device.type == "cpu":
            self._watch.begin()
        own = [gradient for parameter, gradient in members if id(parameter) in self._own]
        if self.measures and own and (self._reduction.weight or self._backend.static_graph):
            self._squares.append(squared_norm(own))
        if self.keeps_last and (self._reduction.weight or self._backend.static_graph):
            self.last |= {one: gradient.clone() for one, gradient in members if id(one) in self._own}

    def _note(self) -> None:
        self._versions = versions(self._parameters)

    def add_aside(self, members: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add what is accumulated apart from `.grad`."""
        gradients, weight = self._aside
        if known := [(view, gradients[parameter]) for parameter, view in members if parameter in gradients]:
            views, others = map(list, zip(*known, strict=True))
            torch._foreach_add_(views, others, alpha=weight)

    @property
    def adds(self) -> bool:
        """Whether something is accumulated apart from `.grad`."""
        return bool(self._aside.gradients)


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
        """Sum the gradients of these parameters from now on, all of the optimizer."""
        check_members(self.module, parameters)
        if self.measures or self.keeps_last:
            raise ValueError(
                "a rule or a controller that reads the gradient noise, or squares, needs a DistributedDataParallel "
                "without a communication hook, because one takes them, but model= has one; create it without "
                "register_comm_hook()"
            )

    def before(self, *, last: bool, weight: float, aside: Aside) -> None:
        """Switch the reduction on before the last microbatch, and off before all others."""
        self.module.require_backward_grad_sync = last
        self._forward |= last and self._begins  # optimizer.backward() comes here, too
        self._begins = False

    def loss_weight(self, samples: float, batch_size: int) -> float:
        """Return the factor on a microbatch's loss, if the ranks average."""
        return self._backend.world.size * samples / batch_size

    def sum(self, gradients: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Sum what travels with the gradients, which `backward()` has summed."""
        check_forward(self._forward)
        if self.loss_scale is not None and gradients:
            torch._foreach_div_(list(gradients), self.loss_scale)
        if others:
            self._all_reduce(others)

    def clear(self) -> None:
        """Forget the step, after its update or to start it over."""
        super().clear()
        self._forward = False

    def reset(self) -> None:
        """Let the module expect no gradients of an earlier forward."""
        reset(self.module)


def _as_laid_out(view: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter in a bucket, which has the strides of the parameter if that has no gaps."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    if parameter.is_contiguous() or reach != parameter.numel():
        return view
    return view.as_strided(parameter.shape, parameter.stride(), view.storage_offset())


def _value(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    try:
        return future.value()[0]
    except RuntimeError as error:
        raise RuntimeError(f"a rank does not take part in the sum of the gradients, {RESTART}: {error}") from error


def _sum(state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations, and takes no text
    return state.sum(bucket)


@final
class _Reduction:
    """The communication hook of a module, which can have one, for all optimizers that train it."""

    def __init__(self, module: DistributedDataParallel, backend: Backend) -> None:
        self.syncs: WeakSet[DDPSync] = WeakSet()
        self.weight = 1.0
        self._group, self._backend = module.process_group, backend
        module.register_comm_hook(self, _sum)

    @torch.no_grad()
    def sum(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to sum this rank's share of a bucket over the ranks."""
        flat, syncs = bucket.buffer(), [sync for sync in self.syncs if not sync.replaced]
        members = [
            (parameter, _as_laid_out(view, parameter))
            for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        for sync in syncs:
            sync.measure(members, last=bucket.is_last())
        self._weigh(flat, members, syncs)
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        return work.get_future().then(_value)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return object, ()  # of a copy of the module, which sums by itself

    def _weigh(self, flat: Tensor, members: list[tuple[Tensor, Tensor]], syncs: list[DDPSync]) -> None:
        """Turn the gradients of a bucket into this rank's share, in place."""
        if not (self.weight or self._backend.static_graph):  # of a replay, which may be non-finite: 0 * inf is nan
            flat.zero_()
            return
        adding = [sync for sync in syncs if sync.adds]
        scale = next((sync.loss_scale for sync in syncs if sync.loss_scale is not None), None)
        wide = flat.float() if is_narrow(flat) and adding else flat
        if wide is not flat:
            begin = flat.storage_offset()
            members = [
                (parameter, wide.as_strided(view.shape, view.stride(), view.storage_offset() - begin))
                for parameter, view in members
            ]
        if self.weight != 1 or self._backend.static_graph:
            wide.mul_(self._backend.scalar(self.weight, wide, "bucket"))
        for sync in adding:
            sync.add_aside(members)
        if scale is not None:
            wide.div_(scale)
        if wide is not flat:
            flat.copy_(wide)


_numbers = count()
_reductions: WeakKeyDictionary[DistributedDataParallel, _Reduction] = WeakKeyDictionary()


def is_reduced(module: DistributedDataParallel) -> bool:
    """Return whether a module has our communication hook."""
    return module in _reductions


def check_members(module: DistributedDataParallel, parameters: Sequence[Tensor]) -> None:
    """Raise ValueError unless all parameters of an optimizer are in a module, and real."""
    own = {id(parameter) for parameter in module.parameters()}
    for number, parameter in enumerate(parameters):
        if parameter.is_complex():
            raise ValueError(
                f"the parameters that a DistributedDataParallel sums by a hook must be real, but parameter {number} "
                f"has dtype {parameter.dtype}; train the bare module, and pass that as model="
            )
        if id(parameter) not in own:
            raise ValueError(
                f"the DistributedDataParallel that is passed as model= must have all parameters of the optimizer, but "
                f"parameter {number}, of shape {tuple(parameter.shape)}, is not in it; put all of them in one module, "
                f"and wrap that"
            )


def check_ranks(module: DistributedDataParallel, backend: Backend) -> None:
    """Raise ValueError unless a module sums over the ranks of a backend."""
    ranks = dist.get_process_group_ranks(module.process_group)
    own = backend.ranks if isinstance(backend, DistributedBackend) else [*range(backend.world.size)]
    if ranks != own:
        raise ValueError(
            f"model= must be a DistributedDataParallel over the ranks that share a batch, but it has ranks {ranks} and "
            f"the optimizer {own}; pass the same process_group to both"
        )


def check_forward(forward: bool) -> None:
    """Raise RuntimeError unless a module's forward of the last microbatch of a step has begun when that was due."""
    if not forward:
        raise RuntimeError(
            "a DistributedDataParallel that is passed as model= must sum in the last backward() of a step, but no "
            "forward of it came after the step() of the microbatch before; call it (not its .module), then backward() "
            "and step(), before the forward of the next microbatch"
        )


def reset(module: DistributedDataParallel) -> None:
    """Let a module expect no gradients of an earlier forward, if torch can."""
    of_torch = getattr(module.reducer, "_reset_state", None)
    if of_torch is not None:
        of_torch()
