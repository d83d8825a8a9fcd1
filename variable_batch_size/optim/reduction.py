"""Sum the gradients of a step over the ranks in buckets, while the last `backward()` of this rank still runs.

Hooks count the gradients. In the first update they learn in which order these come; the ranks agree on one order, which
is saved, and form buckets. In later updates, during the backward of the last microbatch of this rank, a bucket leaves
as soon as its gradients and those of all earlier buckets have come; `step()` sends what is left and waits for it. Which
buckets are summed, and their order, does not depend on when they leave, so that neither do the results.

If a rank has to drop gradients that have left, it voids the round (see `Rounds`). That the loop clears or changes
gradients between `backward()` and `step()` would happen again, so that this rank then sends all of them in `step()`.
For this to be exact, gradients stay as they are until the round is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from variable_batch_size.backend import Backend
from variable_batch_size.data.microbatching import Microbatch
from variable_batch_size.optim.buckets import Bucket, make_buckets
from variable_batch_size.optim.first_gradients import FirstGradients
from variable_batch_size.optim.options import UpdateOptions
from variable_batch_size.optim.participation import READ_EVERY
from variable_batch_size.optim.rounds import RESTART, Rounds

_KEY = "order_of_gradients"  # in a state dict


class Source(Protocol):
    """What a reduction needs of its owner, which it does not keep alive."""

    def prepare_last(self) -> bool:
        """Return whether the next `step()` counts the last microbatch of this rank in a step, and prepare for it."""

    def fill(self, bucket: Bucket) -> Tensor | None:
        """Write this rank's share of the gradients to a bucket; return the weighted squares of the last microbatch."""


@final
class Reduction:
    """Sums the gradients of a step over the ranks, in buckets.

    Args:
        parameters: all parameters of the optimizer.
        backend: backend of the optimizer. It does nothing if this cannot overlap, or has one rank.
        source: where the gradients come from.
        options: `overlap`, `bucket_cap_mb` and `find_unused_parameters`.
        rounds: the sums; those of an earlier reduction may still be under way.
        as_views: whether `.grad` may be a view of a message after the sum, until the next update.

    Attributes:
        order: indices of the parameters in the order in which their gradients are summed; None before the ranks have
            agreed, and empty if gradients come several times per microbatch, so that they cannot leave early.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        backend: Backend,
        source: Source,
        options: UpdateOptions,
        rounds: Rounds,
        *,
        as_views: bool,
    ) -> None:
        self.order: tuple[int, ...] | None = None
        self._parameters, self._backend, self._source = list(parameters), backend, weakref.ref(source)
        self._rounds, self._as_views = rounds, as_views
        self._enabled = options.overlap and backend.overlaps and backend.world.size > 1
        self._bytes = options.bucket_cap_mb * 2**20
        # Whether the host may wait for the sums.
        self._reads = options.find_unused_parameters or all(one.device.type == "cpu" for one in parameters)
        self._hooks: dict[int, RemovableHandle] = {}  # by index of the parameter
        self._first = FirstGradients(parameters)  # before the ranks have agreed
        # Afterwards.
        self._bucket_of: dict[int, Bucket] = {}  # by index of the parameter; empty unless the buckets are of the order
        self._early = True  # whether buckets may leave before `step()`
        self._last: bool | None = None  # whether the gradients that come now are of the last microbatch; None: unknown
        self._arrived: set[int] = set()
        self._again: int | None = None  # a parameter whose gradient came again after it was sent
        self._squares: list[Tensor] = []  # of the buckets that have left
        self._changed: Tensor | None = None  # number of those that changed since, on a device that is not read
        self._voids: Tensor | None = None  # sum of the flags since the last read, on a device that is not read
        self._due: Tensor | None = None  # that sum of some updates ago
        self._updates = 0
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self.watch()

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets; empty before the ranks have agreed, and if the order is empty."""
        return self._rounds.buckets if self._bucket_of else ()

    # The hooks. ---------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Register the hooks, also of parameters that have been unfrozen; remove them where nothing overlaps."""
        if not self._enabled or self.order == ():
            _remove(self._hooks)
            return
        for index, parameter in enumerate(self._parameters):
            if index not in self._hooks and parameter.requires_grad and parameter.is_leaf:
                hook = _hook(weakref.ref(self), index)
                self._hooks[index] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def count(self, index: int) -> None:
        """Count a gradient; send the buckets that it completes."""
        if self.order is None:
            self._first.count(index)
            return
        if self._last is None:
            source = self._source()
            with torch.no_grad():
                ready = self._early and self._rounds.ready and source is not None
                self._last = ready and source.prepare_last()  # type: ignore[union-attr]
        bucket = self._bucket_of.get(index)
        if not self._last or bucket is None:
            return
        if index in self._arrived:
            self._count_again(index)
            return
        self._arrived.add(index)
        bucket.missing -= 1
        while self._rounds.left < len(self.buckets) and not self.buckets[self._rounds.left].missing:
            bucket = self.buckets[self._rounds.left]
            self._send(bucket)
            bucket.note_sent()

    def _count_again(self, index: int) -> None:
        bucket = self._bucket_of[index]
        if bucket.number >= self._rounds.left:
            return  # the bucket will be filled with the sum
        sent, _ = bucket.sent[bucket.indices.index(index)]
        if self._reads and self._parameters[index].grad is not sent:
            self._recall("were cleared and came again")  # what has left was of another backward
        else:
            self._again = index if self._again is None else self._again

    # Before the sum. ----------------------------------------------------------------------------------------------

    def after_microbatch(self, microbatch: Microbatch, *, scaled: bool) -> None:
        """Handle a microbatch that was counted; `scaled`: a `GradScaler` has scaled its gradients.

        Raises:
            RuntimeError: if gradients came again after they were sent; on an accelerator also if they were changed.
        """
        if self.order is None:
            self._first.end_microbatch(alone=not scaled, replay=microbatch.samples == 0)
        elif scaled:
            self._recall("are those of a GradScaler")
        elif not microbatch.ends_step:
            self._last = None
        elif self._again is not None:
            raise RuntimeError(
                f"with overlap a gradient must come once for each microbatch, but that of parameter {self._again}, of "
                f"shape {tuple(self._parameters[self._again].shape)}, came again after it was sent to the other ranks; "
                f"pass overlap=False to the optimizer"
            )
        elif left := self.buckets[: self._rounds.left]:
            changed = None
            if all(bucket.is_same() for bucket in left):
                changed = torch.stack([bucket.changed().to(self._parameters[0].device) for bucket in left]).sum()
            if changed is None or (self._reads and changed.item()):
                self._recall("were changed after backward()")
            elif not self._reads:
                self._changed = changed

    def drop_current(self) -> None:
        """Handle that the gradients since the last `step()` are dropped.

        Raises:
            RuntimeError: if they have left and the host does not read from the device that they do not count.
        """
        self._first.drop()
        if self._rounds.left:
            self._recall("were dropped by zero_grad()")
        self.void()

    def _recall(self, reason: str) -> None:
        """Void the round of gradients that have left, and overlap no longer, because it would happen again."""
        if self._rounds.left and not self._reads:
            raise RuntimeError(
                f"on an accelerator gradients must stay as they are when they were sent to the other ranks during "
                f"backward(), but some {reason}; pass overlap=False to the optimizer"
            )
        self.void()
        self._early = False

    def agree(self, summed: Sequence[bool]) -> None:
        """Agree on the order of the gradients, and form the buckets; every rank has to call it.

        Args:
            summed: for each parameter, whether its gradient is summed; the same on every rank.
        """
        if not self._enabled:
            return
        members = {index for index, member in enumerate(summed) if member}
        if self.order and set(self.order) != members:
            self.order = None
        mine = [*self._rounds.state(), not self._first.once, *self._first.row()]
        rows = self._backend.all_gather_floats([*map(int, mine)], self._parameters[0].device).int().tolist()
        self._rounds.level([row[:2] for row in rows])
        if self.order is None:
            first = [index for _, _, _, *known in rows for index in known if index in members]
            order = dict.fromkeys([*first, *sorted(members, reverse=True)])  # the rest as autograd would come to them
            self.order = () if any(row[2] for row in rows) else tuple(order)
            self._bucket_of = {}
        self._first = FirstGradients(self._parameters)
        if self.order and not self.buckets:
            self._rounds.use(make_buckets(self.order, self._parameters, self._bytes))
            self._bucket_of = {index: bucket for bucket in self._rounds.buckets for index in bucket.indices}
        self.watch()

    # The sum. -----------------------------------------------------------------------------------------------------

    def reduce(self, message: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        """Sum the gradients, and what `message` returns, over the ranks, and set `.grad` of all members.

        Args:
            message: function that returns the tensors, given the weighted squares of the last microbatch.

        Raises:
            RuntimeError: if another rank does not take part.
        """
        tensors: Sequence[Tensor] | None = None
        while True:
            for bucket in self.buckets[self._rounds.left :]:
                self._send(bucket)
            tensors = message(self._squares) if tensors is None else tensors
            ending = self._rounds.end(tensors, self._parameters, flag=self._changed)
            self._begin_round()
            if not self._is_void(ending):
                break
        self._rounds.count()
        for tensor, total in zip(tensors, torch.split(ending[1:], [one.numel() for one in tensors]), strict=True):
            tensor.copy_(total.view(tensor.shape))
        for bucket in self.buckets:
            bucket.give_back(as_views=self._as_views)

    def void(self, *, discarded: bool = False) -> None:
        """Complete the round so that it does not count on any rank, if some of it has left; do not wait for it.

        Args:
            discarded: whether the step is discarded. If the host does not read from the device whether a round is void,
                all ranks do so, and each sends a void round, because another one may have had to.

        Raises:
            RuntimeError: if the other ranks may have taken it as complete.
        """
        self._first.forget()
        self._rounds.void(always=discarded and self._enabled and not self._reads)
        self._begin_round()

    def restore(self) -> None:
        """Forget the round, because a state is loaded on every rank."""
        self._rounds.give_up()
        self.void()

    def check(self) -> None:
        """Raise RuntimeError if a rank has voided a round that this one has used; waits for the device."""
        self._raise_if(self._voids)

    def _send(self, bucket: Bucket) -> None:
        """Fill a bucket with the share of this rank, and start its sum."""
        source = self._source()
        assert source is not None
        if not self._rounds.left:
            self._rounds.wait()  # for a void round, which has used the same memory
        with torch.no_grad():
            squares = source.fill(bucket)
        self._squares += [] if squares is None else [squares]
        self._rounds.send(bucket)

    def _begin_round(self) -> None:
        self._rounds.begin()
        self._last, self._squares, self._again, self._changed = None, [], None, None
        self._arrived.clear()

    def _is_void(self, ending: Tensor) -> bool:
        """Return whether a rank has voided the round; on a device that is not read, raise some updates later."""
        if self._reads:
            return bool(self._backend.host(ending)[0].item())
        self._voids = ending[:1].clone() if self._voids is None else self._voids + ending[:1]
        self._updates += 1
        if self._updates == READ_EVERY:
            due, self._due, self._updates = self._due, self._voids, 0
            self._raise_if(due)
        return False

    def _raise_if(self, voids: Tensor | None) -> None:
        if voids is not None and voids.item():
            self._voids = self._due = None
            raise RuntimeError(
                f"all ranks must discard a step or none, and gradients must not change after backward(), but one rank "
                f"did it alone, {RESTART}; pass overlap=False to the optimizer if its loop changes gradients"
            )

    # State. -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the order of the gradients; an empty dict if the ranks have not agreed on one."""
        self.check()
        return {} if self.order is None else {_KEY: list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; without one, the ranks agree at the next update."""
        order = state.get(_KEY) if self._enabled else None
        fits = order is not None and all(index < len(self._parameters) for index in order)
        order = tuple(order) if fits else None  # type: ignore[arg-type]
        if order != self.order:
            self.order, self._bucket_of = order, {}
        self._first = FirstGradients(self._parameters)
        self._early, self._voids, self._due, self._updates = True, None, None, 0
        self.watch()


def _remove(hooks: dict[int, RemovableHandle]) -> None:
    while hooks:
        hooks.popitem()[1].remove()


def _hook(reduction: weakref.ref[Reduction], index: int) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if (alive := reduction()) is not None:
            alive.count(index)

    return hook
