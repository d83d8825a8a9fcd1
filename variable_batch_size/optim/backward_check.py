"""What `backward()` has added to the gradients since the last `step()`, and whether anything else has changed them.

Each `step()` compares `.grad` with what the last one left there. It sees a missing `backward()`, and gradients that
were cleared or replaced within a step. In the first updates of a run, where a wrong loop is wrong from the start, hooks
also count the accumulations of autograd: a gradient whose version is not that of the last `step()` plus one for each of
them was changed by the loop, for example by `clip_grad_norm_` or `zero_grad(set_to_none=False)`. Changes of
`.grad.data` have no version and cannot be seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

WATCHED = 3  # updates of a run in which hooks count, of those with one microbatch and of those with several

_REMEDY = (
    "clip with max_grad_norm= (in optimizer_options= of a trainer), change gradients in "
    "optimizer.register_step_pre_hook(), remove zero_grad() of the model and of the inner optimizer, because "
    'optimizer.step() clears the gradients, and pass accumulation="buffered" if other backwards run in a step or '
    "gradients are set by hand"
)


class _Seen(NamedTuple):
    gradient: Tensor
    version: int


@final
class BackwardCheck:
    """Checks that only `backward()` changes the gradients between two calls of `step()`.

    Args:
        parameters: all parameters of the optimizer.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._seen: list[Tensor | None] = []  # the gradient of each parameter, as the last `step()` left it
        self._versions: list[int] = []  # of these gradients
        self._accumulated: dict[int, _Seen] = {}  # those with hooks, also after each accumulation; by index
        self._changed = False  # whether a hook has found a change that is no accumulation
        self._compiled = False  # whether compiled autograd ran a hook: there the versions count something else
        self._hooks: dict[int, RemovableHandle] = {}  # by index of the parameter
        self._left = {False: WATCHED, True: WATCHED}  # updates to watch, by whether they have several microbatches
        self.forget()

    def fresh(self) -> list[bool]:
        """Return, for each parameter, whether its gradient is new or has changed since the last `step()`."""
        return [
            (gradient := parameter.grad) is not None and (gradient is not seen or gradient._version != version)
            for parameter, seen, version in zip(self._parameters, self._seen, self._versions, strict=True)
        ]

    def check(self, fresh: Sequence[bool], *, replay: bool, accumulating: bool, unscaled: bool = False) -> None:
        """Check that `backward()` has added the gradients of a microbatch, and nothing else has changed them.

        Args:
            fresh: the result of `fresh()`.
            replay: whether the microbatch is a replay, which may have no gradients.
            accumulating: whether `.grad` holds earlier microbatches of the step.
            unscaled: whether a `GradScaler` has changed them by `unscale_`.

        Raises:
            RuntimeError: if there was no `backward()`, or gradients were cleared, replaced or changed.
        """
        if accumulating:
            self._check_kept()
        if self._compiled:
            self._left = {False: 0, True: 0}
            self.stop()
        if self._hooks and (self._changed or not self._ends_with_accumulations(unscaled)):
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
        self._seen = [parameter.grad for parameter in self._parameters]
        self._versions = [-1 if gradient is None else gradient._version for gradient in self._seen]
        self._accumulated = self._seen_by_hooks()
        self._changed = False

    def forget(self) -> None:
        """Release the gradients, until the next `remember`: a static graph would compute those that are replaced."""
        number = len(self._parameters)
        self._seen, self._versions, self._accumulated = [None] * number, [-1] * number, {}

    def begin(self, *, several: bool) -> None:
        """Decide whether the next update is watched by hooks.

        Args:
            several: whether it has several microbatches on this rank.
        """
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
        if known is not None and gradient is known.gradient and gradient._version != known.version + 1:
            self._changed = True
        self._accumulated[index] = _Seen(gradient, gradient._version)

    def _seen_by_hooks(self) -> dict[int, _Seen]:
        return {
            index: _Seen(gradient, self._versions[index])
            for index in self._hooks
            if (gradient := self._seen[index]) is not None
        }

    def _check_kept(self) -> None:
        """Check that the gradients of the earlier microbatches are still in `.grad`."""
        for parameter, seen in zip(self._parameters, self._seen, strict=True):
            if seen is None or (gradient := parameter.grad) is seen:
                continue
            # backward(create_graph=True) also replaces .grad, by a sum that has a grad_fn.
            if gradient is None or gradient.grad_fn is None:
                raise RuntimeError(
                    f"the gradients of a step must stay in .grad until its last microbatch, but they were "
                    f"{'cleared' if gradient is None else 'replaced'} before it; {_REMEDY}"
                )

    def _ends_with_accumulations(self, unscaled: bool) -> bool:
        """Return whether the gradients are those after the last accumulation; gradients set by hand have none.

        Those that a `GradScaler` has unscaled may have the version after that.
        """
        return all(
            (gradient := self._parameters[index].grad) is None
            or (gradient is seen.gradient and gradient._version == seen.version)
            or (unscaled and gradient is seen.gradient and gradient._version == seen.version + _unscaling(gradient))
            for index, seen in self._accumulated.items()
        )


def _unscaling(gradient: Tensor) -> int:
    """Return by how much `GradScaler.unscale_` raises the version of a gradient: 0 in torch 2.9."""
    probe, zero = gradient.detach().flatten()[:0].clone(), torch.zeros(1, device=gradient.device, dtype=torch.float32)
    before = probe._version
    torch._amp_foreach_non_finite_check_and_unscale_([probe], zero, zero)
    return probe._version - before


def _hook(check: weakref.ref[BackwardCheck], index: int) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        alive = check()
        if alive is not None and parameter.grad is not None:
            alive.count(index, parameter.grad)

    return hook
