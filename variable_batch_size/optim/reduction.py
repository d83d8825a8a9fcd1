"""Sum the gradients of a step over the ranks in buckets, while the last `backward()` of this rank still runs.

Hooks count the gradients. In the first update they learn in which order these come; the ranks agree on one order, which
is saved, and form buckets. In later updates, during the backward of the last microbatch of this rank, a bucket leaves
as soon as its gradients and those of all earlier buckets have come; `step()` sends what is left and waits for it. Which
buckets are summed, and their order, does not depend on when they leave, so that neither do the results.

A round consists of all buckets and then one small message, with everything else that the ranks sum. What has left
cannot be called back: if a rank has to drop its gradients, by `zero_grad()` or `discard_step()`, it completes the round
with zeros and a flag in the message. The round is then void on all ranks, and those that are in `step()` send theirs
again. For this to be exact, gradients stay as they are until the round is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from variable_batch_size.backend import Backend
from variable_batch_size.backend.channel import Channel, Started
from variable_batch_size.data.microbatching import Microbatch
from variable_batch_size.optim.accumulation import scalar_dtype
from variable_batch_size.optim.buckets import Bucket, make_buckets
from variable_batch_size.optim.options import UpdateOptions
from variable_batch_size.optim.participation import READ_EVERY

_KEY = "order_of_gradients"  # in a state dict
_RESTART = (
    "so that the ranks may have made different updates; restart all ranks from the last checkpoint, or restore it on "
    "every rank"
)


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
        as_views: whether `.grad` may be a view of a message after the sum, until the next update.

    Attributes:
        order: indices of the parameters in the order in which their gradients are summed; None before the ranks have
            agreed, and empty if gradients come several times per microbatch, so that they cannot leave early.
        buckets: the buckets; empty before the ranks have agreed, and if the order is empty.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        backend: Backend,
        source: Source,
        options: UpdateOptions,
        *,
        as_views: bool,
    ) -> None:
        self.order: tuple[int, ...] | None = None
        self.buckets: list[Bucket] = []
        self._parameters, self._backend, self._source = list(parameters), backend, weakref.ref(source)
        self._enabled = options.overlap and backend.overlaps and backend.world.size > 1
        self._bytes, self._as_views = options.bucket_cap_mb * 2**20, as_views
        # Whether the host may wait for the sums.
        self._reads = options.find_unused_parameters or all(one.device.type == "cpu" for one in parameters)
        self._hooks: dict[int, RemovableHandle] = {}  # by index of the parameter
        self._channel: Channel | None = None
        # Before the ranks have agreed.
        self._came: list[int] = []  # indices of the gradients since the last `step()`
        self._known: list[int] = []  # those of the last microbatch
        self._repeated = False  # whether a gradient came several times for a microbatch
        # Afterwards.
        self._bucket_of: dict[int, Bucket] = {}
        self._early = True  # whether buckets may leave before `step()`
        self._last: bool | None = None  # whether the gradients that come now are of the last microbatch; None: unknown
        self._arrived: set[int] = set()
        self._again: int | None = None  # a parameter whose gradient came again after it was sent
        self._left = 0  # buckets of the round that have left
        self._squares: list[Tensor] = []  # of these
        self._under_way: list[Started] = []
        self._length: int | None = None  # of the message that ends a round
        self._settling = False  # whether the other ranks may take a round as complete that this one has not
        self._voids: Tensor | None = None  # sum of the flags since the last read, on a device that is not read
        self._due: Tensor | None = None  # that sum of some updates ago
        self._updates = 0
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self.watch()

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
            self._came.append(index)
            return
        if self._last is None:
            source = self._source()
            with torch.no_grad():
                ready = self._early and self._length is not None
                # A void round may still wait for ranks that wait for what this one does after backward.
                ready = ready and not self._under_way
                self._last = ready and source is not None and source.prepare_last()
        bucket = self._bucket_of.get(index)
        if not self._last or bucket is None:
            return
        if index in self._arrived:
            self._count_again(index)
            return
        self._arrived.add(index)
        bucket.missing -= 1
        while self._left < len(self.buckets) and not self.buckets[self._left].missing:
            self._send(self.buckets[self._left])

    def _count_again(self, index: int) -> None:
        bucket = self._bucket_of[index]
        if bucket.number >= self._left:
            return  # the bucket will be filled with the sum
        sent, _ = bucket.sent[bucket.indices.index(index)]
        if self._reads and self._parameters[index].grad is not sent:
            self.void()  # the gradient was cleared since: what has left was of another backward
            self._early = False
        else:
            self._again = index if self._again is None else self._again

    # Before the first update. -------------------------------------------------------------------------------------

    def after_microbatch(self, microbatch: Microbatch, *, scaled: bool) -> None:
        """Handle a microbatch that was counted; `scaled`: a `GradScaler` has scaled its gradients.

        Raises:
            RuntimeError: if gradients have changed since they were sent, as by a second backward.
        """
        if self.order is None:
            self._repeated |= scaled or len(set(self._came)) < len(self._came)
            self._known = self._came if microbatch.samples else self._known
            self._came = []
        elif scaled:
            self.void()
            self._early = False
        elif not microbatch.ends_step:
            self._last = None
        elif self._again is not None:
            raise RuntimeError(
                f"with overlap a gradient must come once for each microbatch, but that of parameter {self._again}, of "
                f"shape {tuple(self._parameters[self._again].shape)}, came again after it was sent to the other ranks; "
                f"pass overlap=False to the optimizer"
            )
        elif not all(bucket.is_unchanged() for bucket in self.buckets[: self._left]):
            raise RuntimeError(
                "with overlap gradients must not change after backward(), but some have changed since they were sent "
                "to the other ranks; call step() right after backward(), change gradients in "
                "optimizer.register_step_pre_hook(), or pass overlap=False to the optimizer"
            )

    def drop_current(self) -> None:
        """Handle that the gradients since the last `step()` are dropped.

        Raises:
            RuntimeError: if they have left and the host does not read from the device that they do not count.
        """
        self._repeated |= bool(self._came)
        self._came = []
        if self._left:
            if not self._reads:
                raise RuntimeError(
                    "on an accelerator gradients cannot be dropped after they were sent to the other ranks, but a "
                    "backward() before zero_grad() has sent some; pass overlap=False to the optimizer"
                )
            self._early = False  # it would happen again
        self.void()

    def agree(self, summed: Sequence[bool]) -> None:
        """Agree on the order of the gradients, and form the buckets; every rank has to call it.

        Args:
            summed: for each parameter, whether its gradient is summed; the same on every rank.
        """
        if not self._enabled:
            return
        members = {index for index, member in enumerate(summed) if member}
        if self.order is not None and self.order != () and set(self.order) != members:
            self.order = None
        if self.order is None:
            known = dict.fromkeys(self._known)
            row = [self._repeated, *known, *(len(summed) - len(known)) * [-1]]
            rows = self._backend.all_gather_floats([*map(int, row)], self._parameters[0].device).int().tolist()
            first = [index for _, *known in rows for index in known if index in members]
            order = dict.fromkeys([*first, *sorted(members, reverse=True)])  # the rest as autograd would come to them
            self.order = () if any(row[0] for row in rows) else tuple(order)
            self.buckets = []
        self._came, self._known, self._repeated = [], [], False
        if self.order and not self.buckets:
            self.buckets = make_buckets(self.order, self._parameters, self._bytes)
            self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.indices}
            self._channel = self._channel or self._backend.open_channel()
        self.watch()

    # The round. ---------------------------------------------------------------------------------------------------

    def reduce(self, message: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        """Sum the gradients, and what `message` returns, over the ranks, and set `.grad` of all members.

        Args:
            message: function that returns the tensors, given the weighted squares of the last microbatch.

        Raises:
            RuntimeError: if another rank does not take part.
        """
        tensors: Sequence[Tensor] | None = None
        while True:
            for bucket in self.buckets[self._left :]:
                self._send(bucket)
            tensors = message(self._squares) if tensors is None else tensors
            ending = _packed(tensors, self._parameters)  # (1 + sum of numels,)
            self._length, self._settling = len(ending), True
            self._start(ending)
            self._wait()
            self._settling = False
            self._begin_round()
            if not self._is_void(ending):
                break
        for tensor, total in zip(tensors, torch.split(ending[1:], [one.numel() for one in tensors]), strict=True):
            tensor.copy_(total.view(tensor.shape))
        for bucket in self.buckets:
            bucket.give_back(as_views=self._as_views)
        self._last = None

    def void(self) -> None:
        """Complete the round so that it does not count on any rank, if some of it has left; do not wait for it.

        Raises:
            RuntimeError: if the other ranks may have taken it as complete.
        """
        if self._settling:
            raise RuntimeError(
                f"a step must be discarded before its gradients are summed over the ranks, but an exception came while "
                f"they were, {_RESTART}"
            )
        self._came = []
        if self._left:
            if self._length is None:
                raise RuntimeError(f"an exception came while the first gradients were sent, {_RESTART}")
            for bucket in self.buckets[self._left :]:
                self._start(bucket.flat.zero_())
            ending = _packed([], self._parameters).new_zeros(self._length)
            ending[0] = 1
            self._start(ending)
        self._begin_round()
        self._last = None

    def restore(self) -> None:
        """Forget the round, because a state is loaded on every rank."""
        if self._settling:  # all of it has left
            self._settling = False
            self._begin_round()
        self.void()

    def check(self) -> None:
        """Raise RuntimeError if a rank has voided a round that this one has used; waits for the device."""
        self._raise_if(self._voids)

    def _send(self, bucket: Bucket) -> None:
        """Fill a bucket with the share of this rank, and start its sum."""
        source = self._source()
        assert source is not None
        if not self._left:
            self._wait()  # for a void round, which has used the same memory
        with torch.no_grad():
            squares = source.fill(bucket)
        self._squares += [] if squares is None else [squares]
        bucket.note_sent()
        self._left += 1
        self._start(bucket.flat)

    def _start(self, flat: Tensor) -> None:
        assert self._channel is not None
        self._under_way.append(self._channel.start_sum(flat))

    def _wait(self) -> None:
        """Wait for all that is under way."""
        try:
            while self._under_way:
                self._under_way[0].wait()
                del self._under_way[0]
        except RuntimeError as error:
            raise RuntimeError(f"a rank does not take part in the sum of the gradients, {_RESTART}: {error}") from error

    def _begin_round(self) -> None:
        self._left, self._squares, self._again = 0, [], None
        self._arrived.clear()
        for bucket in self.buckets:
            bucket.reset()

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
            raise RuntimeError(f"all ranks must discard a step or none, but one rank did it alone, {_RESTART}")

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
            self.order, self.buckets, self._bucket_of, self._channel = order, [], {}, None
        self._came, self._known, self._repeated = [], [], False
        self._early, self._length, self._voids, self._due, self._updates = True, None, None, None, 0
        self.watch()


def _packed(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Return 0 and then the numbers of all tensors, as one flat tensor on the device of the parameters."""
    parts = [tensor.real if tensor.is_complex() else tensor for tensor in tensors]
    flag = torch.zeros(1, dtype=scalar_dtype(parameters), device=parameters[0].device)
    return torch.cat([flag, *(part.reshape(-1).to(flag) for part in parts)])


def _remove(hooks: dict[int, RemovableHandle]) -> None:
    while hooks:
        hooks.popitem()[1].remove()


def _hook(reduction: weakref.ref[Reduction], index: int) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if (alive := reduction()) is not None:
            alive.count(index)

    return hook
