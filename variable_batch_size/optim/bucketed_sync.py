"""Where the world may change, the backend sums buckets of gradients while the last `backward()` of a step runs.

The buckets of a DistributedDataParallel follow its first `backward()`; a rank that joins later would have others. Here
they follow the list of parameters alone. When the last `backward()` of this rank has completed the gradients of a
bucket, its share of them is copied there, weighted, and sent; `.grad` stays as it is. A sum that was begun early holds
only if the gradients have not changed afterwards, as by a second `backward()`. Otherwise the update is made again on
all ranks, and this one sends no more before `step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from variable_batch_size._log import log
from variable_batch_size.backend import ElasticBackend
from variable_batch_size.backend.elastic import describe
from variable_batch_size.optim.accumulation import NOTHING, Aside
from variable_batch_size.optim.sync import Sync
from variable_batch_size.optim.tensors import is_narrow

_BUCKET = 25 << 20  # bytes, as in DistributedDataParallel


@final
class _Bucket:
    """A flat message, in which each of some parameters has a view, by index."""

    def __init__(self, parameters: Sequence[Tensor], indices: Sequence[int]) -> None:
        members = [parameters[index] for index in indices]
        self.flat = members[0].new_empty(sum(member.numel() for member in members))
        pairs = zip(torch.split(self.flat, [member.numel() for member in members]), members, strict=True)
        self.views = dict(zip(indices, (view.view(member.shape) for view, member in pairs), strict=True))
        self.missing: set[int] = set()  # whose gradients are not yet in it


@final
class BucketedSync(Sync):
    """An elastic backend sums in the last `backward()` of a step, if that is `optimizer.backward()`; else after it.

    What travels with the gradients is known by its shapes in the last update, so that the first one is summed late.
    """

    early = True

    def __init__(self, backend: ElasticBackend) -> None:
        super().__init__(backend)
        self._elastic = backend
        self._parameters, self._hooks = list[Tensor](), list[RemovableHandle]()
        self._buckets, self._others = list[_Bucket](), list[Tensor]()
        self._open = False  # whether a sum is under way
        self._changes = False  # whether what was sent did not hold once, because the loop changes it
        self._weight, self._aside = 1.0, NOTHING
        self._sent = 0  # buckets of the sum under way
        self._seen: dict[int, tuple[Tensor, int]] = {}  # by index, the gradients that were copied, and their versions

    def use(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of these parameters from now on, all of the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._parameters, self._buckets, self._others = list(parameters), [], []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad and parameter.is_leaf
        ]

    def before(self, *, last: bool, weight: float, aside: Aside) -> None:
        """Begin the sum before the last `backward()` of this rank in the step, if it is known what is summed."""
        if not last or self._open or self._changes or not self._others:
            return
        self._begin(self._others)
        self._weight, self._aside, self._seen = weight, aside, {}
        if not weight:  # a replay, whose gradients may be non-finite: 0 * inf is nan
            for bucket in self._buckets:
                bucket.flat.zero_()
                bucket.missing.clear()
            self._send()

    def _begin(self, others: Sequence[Tensor]) -> None:
        for bucket in self._buckets:
            bucket.missing = {*bucket.views}
        shapes = [describe(tensor) for tensor in (*(bucket.flat for bucket in self._buckets), *others)]
        self._open, self._sent = True, 0
        self._elastic.begin_sum(self._buckets[0].flat, shapes)

    def _send(self) -> None:
        """Send the buckets that are complete, in the order that all ranks have."""
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._elastic.send(self._buckets[self._sent].flat)
            self._sent += 1

    @torch.no_grad()
    def complete(self, index: int) -> None:
        """Copy this rank's share of a gradient, which is complete, and send the bucket if that is."""
        if not self._open:
            return
        for bucket in self._buckets:
            if index in bucket.missing:
                gradient = self._parameters[index].grad
                assert gradient is not None  # which was just accumulated
                self._seen[index] = gradient, gradient._version
                self._copy(index, bucket)
                self._send()

    def _copy(self, index: int, bucket: _Bucket) -> None:
        parameter, view, (others, weight) = self._parameters[index], bucket.views[index], self._aside
        bucket.missing.discard(index)
        gradient, other = parameter.grad, others.get(parameter)
        if is_narrow(view) and other is not None:
            wide = torch.zeros_like(other) if gradient is None else gradient.float().mul_(self._weight)
            view.copy_(wide.add_(other, alpha=weight))
            return
        if gradient is None:
            view.zero_()
        else:
            torch.mul(gradient, self._weight, out=view)
        if other is not None:
            view.add_(other, alpha=weight)

    @torch.no_grad()
    def shares(self, members: Sequence[bool], used: Sequence[bool], aside: Aside) -> list[Tensor] | None:
        """Send what is left, and put the shares into `.grad`; None if the sum has not begun."""
        if not self._open:
            return None
        views = {index: view for bucket in self._buckets for index, view in bucket.views.items()}
        same = all(
            self._parameters[index].grad is gradient and gradient._version == version
            for index, (gradient, version) in self._seen.items()
        )
        self._changes = not same or [index for index, member in enumerate(members) if member] != sorted(views)
        self._aside = aside
        for bucket in self._buckets:
            for index in [*bucket.missing]:  # those that the last backward() did not reach
                if used[index]:
                    self._copy(index, bucket)
                else:
                    bucket.views[index].zero_()
                    bucket.missing.discard(index)
        self._send()
        for index, parameter in enumerate(self._parameters):
            parameter.grad = views.get(index)
        return [views[index] for index in sorted(views)]

    def sum(self, gradients: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """End the sum, or make it if it has not begun."""
        late, shapes = not self._open, [describe(tensor) for tensor in others]
        if late:
            self._plan(gradients)
            self._begin(others)
            _copy(self._views(), gradients)
            for bucket in self._buckets:
                bucket.missing.clear()
            self._send()
        elif shapes != [describe(tensor) for tensor in self._others]:
            self._changes = True
        self._open, holds = False, late or not self._changes
        if not holds:
            log("The gradients have changed after backward(), or what travels with them: they are sent in step()")
        self._elastic.end_sum(others if holds else self._others, holds=holds)
        if late:
            _copy(gradients, self._views())
        self._others = [torch.empty_like(tensor) for tensor in others]

    def _plan(self, gradients: Sequence[Tensor]) -> None:
        """Make the buckets of the parameters that have these gradients, unless they are there."""
        index_of = {id(parameter.grad): index for index, parameter in enumerate(self._parameters)}
        indices = [index_of[id(gradient)] for gradient in gradients]
        if indices == sorted(index for bucket in self._buckets for index in bucket.views):
            return
        self._buckets, parts = [], dict[object, list[int]]()
        for index in reversed(indices):  # about the order in which backward() reaches them
            parameter = self._parameters[index]
            part = parts.setdefault((parameter.device, parameter.dtype), [])
            part.append(index)
            if sum(self._parameters[one].nbytes for one in part) >= _BUCKET:
                self._buckets.append(_Bucket(self._parameters, part))
                part.clear()
        self._buckets += [_Bucket(self._parameters, part) for part in parts.values() if part]

    def _views(self) -> list[Tensor]:
        views = {index: view for bucket in self._buckets for index, view in bucket.views.items()}
        return [views[index] for index in sorted(views)]

    def clear(self) -> None:
        """Forget the step, after its update or to start it over; the sum then breaks, for which the others wait."""
        super().clear()
        if not self._open:
            return
        for bucket in self._buckets:
            bucket.missing.clear()
        self._send()
        self._open = False
        with suppress(RuntimeError):
            self._elastic.end_sum(self._others, holds=False)

    def restart(self) -> None:
        """Forget a sum that was interrupted, and what travelled with the last one: a state is loaded."""
        super().restart()
        self._others = []


def _copy(to: Iterable[Tensor], those: Iterable[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_([*to], [*those])


def _hook(sync: weakref.ref[BucketedSync], index: int) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if not torch.compiler.is_compiling() and (alive := sync()) is not None:
            alive.complete(index)

    return hook
