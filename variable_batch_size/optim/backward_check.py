"""What `backward()` has added to the gradients since the last `step()`, and whether anything else has changed them.

Each `step()` compares `.grad` with what the last one left there: it sees a missing `backward()`, and gradients that
were cleared or replaced within a step. `optimizer.backward()` compares before and after, so that every change by
something else is seen: `clip_grad_norm_`, `zero_grad(set_to_none=False)`, another backward. In a loop that calls
`loss.backward()`, hooks count the accumulations of autograd in the first updates of a run, where a wrong loop is wrong
from the start: a gradient whose version is not that of the last `step()` plus one for each of them was changed by the
loop. Changes of `.grad.data` have no version and cannot be seen. Changes of sharded gradients by foreach functions, as
in `clip_grad_norm_`, are noticed by their norms, in the first updates only, because a device must be read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from operator import is_
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from variable_batch_size.optim.tensors import are_parts, local

WATCHED = 3  # updates of a run in which hooks count, of those with one microbatch and of those with several

_REMEDY = (
    "pass a DistributedDataParallel to the optimizer as model=, clip with max_grad_norm= (in optimizer_options= of a "
    "trainer), change gradients in "
    "optimizer.register_step_pre_hook(), remove zero_grad() of the model and of the inner optimizer, because "
    'optimizer.step() clears the gradients, and pass accumulation="buffered" if other backwards run in a step or '
    "gradients are set by hand"
)


class _Seen(NamedTuple):
    gradient: Tensor
    version: int


def versions(parameters: Sequence[Tensor]) -> list[int]:
    """Return the version of the gradient of each parameter, -1 where it has none."""
    return [-1 if parameter.grad is None else _version(parameter.grad) for parameter in parameters]


def _version(gradient: Tensor) -> int:
    inner = gradient._local_tensor._version if isinstance(gradient, DTensor) else 0  # to which FSDP2 adds
    return gradient._version + inner


class _Gradients(NamedTuple):
    """The gradient of each parameter at some moment, and its version."""

    tensors: list[Tensor | None]
    versions: list[int]

    @classmethod
    def of(cls, parameters: Sequence[Tensor]) -> _Gradients:
        return cls([parameter.grad for parameter in parameters], versions(parameters))

    def change(self, other: _Gradients) -> int | None:
        """Return the first parameter whose gradient is another one or was changed; None if there is none."""
        if self.versions == other.versions and all(map(is_, self.tensors, other.tensors)):
            return None
        pairs = zip(*self, *other, strict=True)
        return next(i for i, (old, version, new, now) in enumerate(pairs) if old is not new or version != now)


@final
class BackwardCheck:
    """Checks that only `backward()` changes the gradients between two calls of `step()`.

    `sums`: whether `step()` sums over several ranks, so that nothing else may.
    """

    def __init__(self, parameters: Sequence[Tensor], *, sums: bool = False) -> None:
        self._parameters, self._sums = list(parameters), sums
        self._seen = _Gradients([], [])  # as the last `step()` left them
        self._ours: _Gradients | None = None  # as the last `optimizer.backward()` left them, if it came later
        self._accumulated: dict[int, _Seen] = {}  # those with hooks, also after each accumulation; by index
        self._changed = False  # whether a hook has found a change that is no accumulation
        self._compiled = False  # whether compiled autograd ran a hook: there the versions count something else
        self._hooks: dict[int, RemovableHandle] = {}  # by index of the parameter
        self._left = {False: WATCHED, True: WATCHED}  # updates to watch, by whether they have several microbatches
        self._probed = {False: WATCHED, True: WATCHED} if are_parts(self._parameters) else {}  # in which norms are
        self._norms: list[Tensor] | None = None  # of sharded gradients, when they were last seen
        self.forget()

    def fresh(self) -> list[bool]:
        """Return, for each parameter, whether its gradient is new or has changed since the last `step()`."""
        now = _Gradients.of(self._parameters)
        return [
            gradient is not None and (gradient is not seen or version != known)
            for gradient, version, seen, known in zip(*now, *self._seen, strict=True)
        ]

    def before_backward(self) -> None:
        """Check that the gradients are as `step()`, or the last `optimizer.backward()`, has left them."""
        if not self._sums:
            self._left = {False: 0, True: 0}  # without hooks
            self.stop()
        self._check_ours(self._ours or self._seen, unscaled=False)

    @property
    def ours(self) -> bool:
        """Whether `optimizer.backward()` has run since the last `step()`."""
        return self._ours is not None

    def after_backward(self) -> None:
        """Record the gradients that `optimizer.backward()` leaves."""
        if self._hooks and not self._compiled and not self._ends_with_accumulations():
            raise RuntimeError(
                "the gradients must be summed over the ranks by step() alone, but within backward() something has "
                "changed those that autograd had accumulated, as a DistributedDataParallel does; pass it to the "
                "optimizer as model=, or switch its reduction off (model.require_backward_grad_sync = False)"
            )
        self._ours = _Gradients.of(self._parameters)
        self._note_norms()

    def _note_norms(self) -> None:
        if self._norms is not None:
            self._norms = _norms(self._parameters)

    def _check_ours(self, left: _Gradients, *, unscaled: bool) -> None:
        number = left.change(_Gradients.of(self._parameters))
        if number is None and self._norms and not unscaled:
            pairs = enumerate(zip(self._norms, _norms(self._parameters), strict=True))
            number = next((i for i, (old, new) in pairs if not old.equal(new) and not old.isnan()), None)
        if number is not None:
            raise RuntimeError(
                f"only optimizer.backward() may change gradients between two calls of step(), but something else has "
                f"changed that of parameter {number}, of shape {tuple(self._parameters[number].shape)}: loss.backward()"
                f", for example, or clipping in the loop; {_REMEDY}; what another backward() has left before the first "
                f"microbatch of a step is dropped by optimizer.zero_grad()"
            )

    def check(
        self, fresh: Sequence[bool], *, replay: bool, accumulating: bool, changed: bool = False, unscaled: bool = False
    ) -> None:
        """Check that `backward()` has added the gradients of a microbatch, and nothing else has changed them.

        Args:
            replay: whether the microbatch is a replay, which may have no gradients.
            accumulating: whether `.grad` holds earlier microbatches of the step.
            changed: whether something else may have changed them, as a sum in `backward()` does.
            unscaled: whether `GradScaler.unscale_` has changed them.
        """
        if self._ours is not None:
            self._check_ours(self._ours, unscaled=unscaled)
        elif accumulating:
            self.check_kept()
        if self._compiled:
            self._left = {False: 0, True: 0}
            self.stop()
        watches = self._hooks and self._ours is None and not changed
        if watches and (self._changed or not self._ends_with_accumulations(unscaled=unscaled)):
            raise RuntimeError(
                f"only backward() may change gradients between two calls of step(), but something else has changed "
                f"them; {_REMEDY}"
            )
        if not replay and not any(fresh):
            raise RuntimeError(
                "each step() must follow the backward() of one microbatch, but no gradient has changed since the last "
                "step(); call loss.backward() first"
            )

    def remember(self) -> None:
        """Record the gradients as they are now."""
        self._seen, self._ours = _Gradients.of(self._parameters), None
        self._accumulated = self._seen_by_hooks()
        self._changed = False
        self._note_norms()

    def forget(self) -> None:
        """Release the gradients, until the next `remember`: a static graph would compute those that are replaced."""
        number = len(self._parameters)
        self._seen, self._ours, self._accumulated = _Gradients([None] * number, [-1] * number), None, {}

    def begin(self, *, several: bool) -> None:
        """Decide whether hooks watch the next update, which has several microbatches on this rank or one."""
        probed = self._probed.get(several, 0) > 0
        self._norms = [] if probed else None
        self._probed |= {several: self._probed.get(several, 0) - 1} if probed else {}
        watched = self._left[several] > 0
        self._left[several] -= watched
        if watched and not self._hooks:
            for index, parameter in enumerate(self._parameters):
                if parameter.requires_grad and parameter.is_leaf:
                    hook = _hook(weakref.ref(self), index)
                    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._hooks[index] = handle
            self._accumulated = self._seen_by_hooks()
        elif not watched:
            self.stop()

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def count(self, index: int, gradient: Tensor) -> None:
        """Count one accumulation of autograd in the gradient of a parameter."""
        if torch.compiler.is_compiling():
            self._compiled = True
            return
        known = self._accumulated.get(index)
        if known is not None and gradient is known.gradient and _version(gradient) != known.version + 1:
            self._changed = True
        self._accumulated[index] = _Seen(gradient, _version(gradient))

    def _seen_by_hooks(self) -> dict[int, _Seen]:
        return {
            index: _Seen(gradient, self._seen.versions[index])
            for index in self._hooks
            if (gradient := self._seen.tensors[index]) is not None
        }

    def check_kept(self) -> None:
        """Check that the gradients of the earlier microbatches are still in `.grad`."""
        for parameter, seen in zip(self._parameters, self._seen.tensors, strict=True):
            if seen is None or (gradient := parameter.grad) is seen:
                continue
            # backward(create_graph=True) also replaces .grad, by a sum that has a grad_fn.
            if gradient is None or gradient.grad_fn is None:
                raise RuntimeError(
                    f"the gradients of a step must stay in .grad until its last microbatch, but they were "
                    f"{'cleared' if gradient is None else 'replaced'} before it; {_REMEDY}"
                )

    def _ends_with_accumulations(self, *, unscaled: bool = False) -> bool:
        """Return whether the gradients are those after the last accumulation; gradients set by hand have none."""
        return all(
            (gradient := self._parameters[index].grad) is None
            or (
                gradient is seen.gradient
                and _version(gradient) == seen.version + (_versions_of_unscale(gradient.device) if unscaled else 0)
            )
            for index, seen in self._accumulated.items()
        )


@cache
def _versions_of_unscale(device: torch.device) -> int:
    """Return how many versions `GradScaler.unscale_` adds to a gradient: 0 in torch 2.9, whose operator has none."""
    probe = torch.zeros((), device=device, requires_grad=True)
    probe.grad = torch.zeros((), device=device)
    scaler, before = GradScaler(device.type), probe.grad._version
    scaler.scale(probe)  # without it there is no scale
    scaler.unscale_(torch.optim.SGD([probe], lr=0.0))
    return probe.grad._version - before


def _norms(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each gradient's part on this rank; 0 without one."""
    none = torch.zeros(())
    found = [none if parameter.grad is None else parameter.grad for parameter in parameters]
    return list(torch._foreach_norm(local(found)))


def _hook(check: weakref.ref[BackwardCheck], index: int) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        alive = check()
        if alive is not None and parameter.grad is not None:
            alive.count(index, parameter.grad)

    return hook
