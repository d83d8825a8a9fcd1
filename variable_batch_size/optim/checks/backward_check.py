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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from variable_batch_size._validation import in_documentation
from variable_batch_size.optim.tensors.arithmetic import has_dtensor
from variable_batch_size.optim.tensors.hooks import remove_all, remove_with, weakly
from variable_batch_size.optim.tensors.parameters import Gradients, Parameters, versions_of

WATCHED = 3  # updates of a run in which hooks count, of those with one microbatch and of those with several

_REMEDY = f"clip with max_grad_norm=, leave zero_grad() to step(); {in_documentation('Mistakes')}"


@final
class BackwardCheck:
    """Checks that only `backward()` changes the gradients between two calls of `step()`.

    Args:
        parameters: the parameters whose gradients are checked.
        sums: whether `step()` sums gradients over several ranks, so that nothing else may.
    """

    def __init__(self, parameters: Parameters, *, sums: bool) -> None:
        self._parameters, self._sums = parameters, sums
        # The gradients as the last `optimizer.backward()` left them; None if none has come since the last `step()`.
        self._ours: Gradients | None = None
        # By number of a parameter with a hook: its gradient, and the version of that, after the last accumulation.
        self._counted: dict[int, tuple[Tensor, int]] = {}
        self._changed = self._compiled = False  # whether a hook has seen a change; whether compiled autograd ran a hook
        self._hooks: list[RemovableHandle] = []
        self._hooked: list[int] = []  # numbers of the parameters that have a hook
        # How many updates are still to be watched by hooks, by whether they have several microbatches; and by norms.
        self._to_watch = {False: WATCHED, True: WATCHED}
        self._to_probe = {False: WATCHED, True: WATCHED} if has_dtensor(self._parameters) else {}
        self._probes = False  # whether norms are compared in the update under way
        remove_with(self, self._hooks)
        self.forget()

    @property
    def has_backward(self) -> bool:
        """Whether `optimizer.backward()` has run since the last `step()`."""
        return self._ours is not None

    def find_fresh(self) -> list[bool]:
        """Return, for each parameter, whether its gradient is new or has changed since the last `step()`."""
        self._now = Gradients.of(self._parameters, norms=self._probes)
        # `_seen` are the gradients after the last `step()`. [:2] are the tensors, and how often they were changed.
        columns = zip(*self._now[:2], *self._seen[:2], strict=True)
        return [
            gradient is not None and (gradient is not old_gradient or version != old_version)
            for gradient, version, old_gradient, old_version in columns
        ]

    def before_backward(self) -> None:
        """Raise RuntimeError if gradients are not as the last `step()` or `optimizer.backward()` has left them.

        It is called right before a `backward()` of the optimizer.
        """
        if not self._sums:  # hooks are not needed: no DistributedDataParallel can sum within `backward()`
            self._to_watch = {False: 0, True: 0}
            self._remove_hooks()
        self._check_unchanged(self._ours or self._seen, Gradients.of(self._parameters, norms=self._probes))

    def after_backward(self) -> None:
        """Record the gradients that `optimizer.backward()` leaves, and check that only autograd has added to them."""
        if self._hooks and not self._compiled and not self._nothing_followed_accumulations():
            raise RuntimeError(
                "step() alone sums over the ranks, but within backward() something has changed the gradients, as a "
                "DistributedDataParallel does; pass it as model=, or set model.require_backward_grad_sync = False"
            )
        self._ours = Gradients.of(self._parameters, norms=self._probes)

    @contextmanager
    def note_other_backward(self) -> Iterator[None]:
        """Record whether a `backward()` of another optimizer, within a block, changes the gradients of this one.

        `check` then raises an error.
        """
        before = Gradients.of(self._parameters)
        yield
        self._of_another |= before.first_changed(Gradients.of(self._parameters)) is not None

    def _check_unchanged(self, before: Gradients, now: Gradients) -> None:
        """Raise RuntimeError if a gradient was replaced or changed between two moments, `before` and `now`."""
        number = before.first_changed(now)
        if number is not None:
            shape = tuple(self._parameters[number].shape)
            raise RuntimeError(
                f"the gradient of parameter {number}, of shape {shape}, has changed outside optimizer.backward(); "
                f"{_REMEDY}"
            )

    def check(self, fresh: Sequence[bool], *, needed: bool, accumulating: bool = False) -> None:
        """Check that `backward()` has added the gradients of a microbatch, and nothing else has changed them.

        Args:
            fresh: what `find_fresh` has just returned.
            needed: whether there must be gradients. A microbatch with weight 0 need not have any.
            accumulating: whether `.grad` also holds earlier microbatches of the step.
        """
        if self._ours is not None:  # the gradients as `optimizer.backward()` has left them
            self._check_unchanged(self._ours, self._now)
        elif self._of_another:
            raise RuntimeError(
                "a loss has its weight once, but backward() of another optimizer of the sampler has added to these "
                "gradients; pass it others=[optimizer], or call zero_grad() of this one before its own backward()"
            )
        elif accumulating:
            self._check_accumulated_stays()
        if self._compiled:  # compiled autograd may raise versions in another way
            self._to_watch = {False: 0, True: 0}
            self._remove_hooks()
        if self._hooks and self._ours is None and (self._changed or not self._nothing_followed_accumulations()):
            raise RuntimeError(
                f"only backward() may change gradients, but something else has changed them; pass DDP as model=, "
                f"{_REMEDY}"
            )
        if needed and not any(fresh):
            raise RuntimeError(
                "each step() must follow the backward() of one microbatch, but no gradient has changed since the last; "
                "call loss.backward() first, of the model whose parameters the optimizer has, and no zero_grad()"
            )

    def _check_accumulated_stays(self) -> None:
        """Raise RuntimeError unless the gradients of the step's earlier microbatches are still in `.grad`."""
        for parameter, gradient_before in zip(self._parameters, self._seen.tensors, strict=True):
            gradient = parameter.grad
            if gradient_before is None or gradient is gradient_before:
                continue
            # backward(create_graph=True) also replaces .grad, by a sum that has a grad_fn.
            if gradient is None or gradient.grad_fn is None:
                raise RuntimeError(
                    f"the gradients of a step must stay in .grad until its last microbatch, but they were "
                    f"{'cleared' if gradient is None else 'replaced'} before it; {_REMEDY}"
                )

    def remember(self) -> None:
        """Record the gradients as they are now, at the end of `step()`: the next `step()` compares with them."""
        self._now = self._seen = Gradients.of(self._parameters, norms=self._probes)
        self._ours, self._of_another = None, False
        self._restart_counts()

    def forget(self) -> None:
        """Release the gradients, until the next `remember`.

        As long as something refers to a gradient that is replaced, a static graph would compute it as a result.
        """
        number = len(self._parameters)
        self._now = self._seen = Gradients.none(number)
        self._ours, self._counted, self._of_another = None, {}, False

    def begin(self, *, several: bool) -> None:
        """Before each microbatch, add or remove hooks that count what autograd adds to gradients.

        They watch the first `WATCHED` updates of a run, where a wrong loop is wrong from the start: so many with
        `several` microbatches on this rank, and so many with one.
        """
        self._probes = self._to_probe.get(several, 0) > 0
        if self._probes:
            self._to_probe[several] -= 1
        watched = self._to_watch[several] > 0
        if watched:
            self._to_watch[several] -= 1
        if watched and not self._hooks:
            for index, parameter in enumerate(self._parameters):
                if parameter.requires_grad and parameter.is_leaf:
                    hook = weakly(self._count, index)
                    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._hooks.append(handle)
                    self._hooked.append(index)
            self._restart_counts()
        elif not watched:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        remove_all(self._hooks)
        self._hooked.clear()

    def _restart_counts(self) -> None:
        """Let the hooks count from the gradients that the last `step()` has left."""
        self._changed = False  # whether a hook has seen a change that was not autograd's
        self._counted = {}
        for number in self._hooked:
            gradient = self._seen.tensors[number]
            if gradient is not None:
                self._counted[number] = gradient, self._seen.versions[number]

    def _count(self, index: int, parameter: Tensor) -> None:
        """Record, as a hook, that autograd has added to a parameter's gradient, and whether anything else changed it.

        The version of a tensor counts its changes in place: autograd adds 1 to it. `index`: of the parameter.
        """
        gradient = parameter.grad
        if gradient is None:
            return
        if torch.compiler.is_compiling():
            self._compiled = True
            return
        last_gradient, last_version = self._counted.get(index, (None, 0))
        (version,) = versions_of([gradient])
        self._changed |= last_gradient is gradient and version != last_version + 1
        self._counted[index] = gradient, version

    def _nothing_followed_accumulations(self) -> bool:
        """Return whether the last change of each gradient was an accumulation of autograd.

        Gradients that were set by hand do not count.
        """
        now_and_counted = ((self._parameters[index].grad, *counted) for index, counted in self._counted.items())
        return all(
            now is None or (now is last and versions_of([now]) == [version]) for now, last, version in now_and_counted
        )
