"""The square of the gradient that a rank's microbatch gives to a sharded model, before FSDP2 sums it.

Hooks of the parameters that FSDP2 gathers see it, also where a single rank has the shard, and under tensor parallelism,
where they are DTensors. What several ranks have is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor

from variable_batch_size.optim.hooks import call_before_forward
from variable_batch_size.optim.tensors import groups_of_parts, squared_norm


@final
class Squares:
    """Takes the squares of a microbatch's gradients."""

    def __init__(self, parts: Iterable[tuple[Any, Sequence[Any]]], parameters: Sequence[Tensor]) -> None:
        self._own = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._parameters = list(parameters)
        self._measured = False
        # By parameter: its square, and the groups of ranks over which that must be summed.
        self._found: dict[int, tuple[Tensor, list[dist.ProcessGroup]]] = {}
        self._seen: set[int] = set()  # in this step
        self._watched: set[int] = set()
        for part, groups in parts:
            call_before_forward(part, self._watch, groups)

    def begin(self, *, measured: bool) -> None:
        """Forget the last microbatch."""
        self._found.clear()
        self._measured = measured

    def clear(self) -> None:
        """Forget the step."""
        self._seen.clear()

    def total(self) -> Tensor:
        """Return the square of the last microbatch, 0-D, the same on ranks that have computed it together."""
        self._seen |= self._found.keys()
        for number, parameter in enumerate(self._parameters if len(self._seen) < len(self._parameters) else ()):
            if parameter.grad is not None and number not in self._seen:
                raise RuntimeError(
                    f"the gradient noise needs the gradient of each microbatch before FSDP2 sums it, but that of "
                    f"parameter {number}, of shape {tuple(parameter.shape)}, was not seen; call the root module for "
                    f"the forward of each microbatch, or choose a rule that needs no noise"
                )
        by_ranks: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
        for _, (square, groups) in sorted(self._found.items()):
            by_ranks.setdefault(tuple(groups), []).append(square)
        totals = []
        for ranks, squares in by_ranks.items():
            totals.append(torch.stack(squares).sum())
            for group in ranks:
                dist.all_reduce(totals[-1], group=group)
        return torch.stack(totals).sum() if totals else torch.zeros(())

    def _watch(self, groups: Sequence[Any]) -> None:
        """Add hooks to the parameters that were gathered for a forward, the first time."""
        for one in (one for group in groups for one in group.fsdp_params):
            number = self._own.get(id(one.sharded_param))
            if number is None or number in self._watched or not one.sharded_param.requires_grad:
                continue
            self._watched.add(number)
            hook = _AfterAccumulation(ref(self), number)
            finalize(self, one.unsharded_param.register_post_accumulate_grad_hook(hook).remove).atexit = False

    @torch.no_grad()
    def _take(self, number: int, gradient: Tensor) -> None:
        if self._measured:
            ((parts, groups),) = groups_of_parts([gradient])
            self._found[number] = squared_norm(parts), groups


@final
class _AfterAccumulation:
    def __init__(self, squares: ref[Squares], number: int) -> None:
        self._squares, self._number = squares, number

    def __call__(self, parameter: Tensor) -> None:
        if (alive := self._squares()) is not None and parameter.grad is not None:
            alive._take(self._number, parameter.grad)
