"""Measures the squares of the gradient of each microbatch, before it is summed with others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from variable_batch_size.optim.stage import Needs
from variable_batch_size.optim.tensors.arithmetic import (
    collect_gradients,
    groups_of_parts,
    norm_of,
    squared_norm,
    sum_of_squares,
    widen,
)
from variable_batch_size.optim.tensors.hooks import remove_with, uncompiled, weakly
from variable_batch_size.optim.tensors.parameters import Parameters

_EACH = "the gradient noise, and squares, need one backward() for each microbatch"


@final
class Squares:
    """Measures the squares of the gradient of one backward, by hooks.

    An element of a parameter that several ranks hold, as in tensor parallelism, is counted once.

    Args:
        parameters: the parameters of the optimizer.
        needs: function that says what the next microbatch is measured for; it is called once for each microbatch.
    """

    def __init__(self, parameters: Parameters, needs: Callable[[], Needs | None]) -> None:
        self.parameters = parameters
        self._ask = needs
        self._hooks: list[RemovableHandle] = []
        self._accumulations: list[Node] = []  # nodes with hooks; torch would drop a node that nobody refers to
        remove_with(self, self._hooks)
        self.clear()

    def clear(self) -> None:
        """Forget the squares of a microbatch's gradient, before the next microbatch is measured."""
        self._needs: Needs | None = None  # what the microbatch is measured for, once it is known
        # By number of the parameter: |g| of this rank's part, and the groups of ranks that have other parts.
        self._measured: dict[int, tuple[Tensor, tuple[dist.ProcessGroup, ...]]] = {}
        self.elements: dict[Tensor, Tensor] = {}  # by parameter: g^2, elementwise
        self._twice = False  # whether a parameter got gradients by several backward passes

    @property
    def seen(self) -> Iterable[int]:
        """The parameters, by number, to which this microbatch has given a gradient."""
        return self._measured.keys()

    @property
    def needs(self) -> Needs:
        """Which squares of this microbatch are needed: of the norm of its gradient, of elements, or none."""
        if self._needs is None:  # ask once a microbatch
            self._needs = self._ask() or Needs()
        return self._needs

    def add_hooks(self) -> None:
        """Add hooks that measure what each backward adds to `.grad`, after the user's hooks have changed it.

        They belong to the node of autograd that accumulates into a parameter. A frozen parameter, which may be unfrozen
        later, gets one as well: it has to require a gradient for a moment, because otherwise it has no node.
        """
        for number, parameter in enumerate(self.parameters):
            if parameter.is_leaf:
                requires_grad = parameter.requires_grad
                accumulation = get_gradient_edge(parameter.requires_grad_()).node
                self._accumulations.append(accumulation)
                self._hooks.append(accumulation.register_prehook(weakly(self._measure_first, number)))
                parameter.requires_grad_(requires_grad)

    def _measure_first(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Measure, as a hook of autograd, what a backward is about to add to `.grad` of a parameter.

        `number`: index of the parameter. `gradients`: that one gradient.
        """
        (gradient,) = gradients
        if gradient is not None:
            # Compiled autograd would compile `_measure`, and again for each gradient.
            measure = self._measure_uncompiled if torch.compiler.is_compiling() else self._measure
            measure(number, gradient)

    def measure_accumulated(self, number: int, parameter: Tensor) -> None:
        """Measure `.grad` of a parameter: all that a microbatch has given to it, by one or several backward passes."""
        if parameter.grad is not None:
            self._measure(number, parameter.grad, whole=True)

    @uncompiled
    def _measure_uncompiled(self, number: int, gradient: Tensor) -> None:
        self._measure(number, gradient)

    def _measure(self, number: int, gradient: Tensor, *, whole: bool = False) -> None:
        """Store |g|, and g^2 elementwise if it is needed, of the gradient of a parameter.

        `number`: index of the parameter. `whole`: whether the gradient also contains what earlier backward passes of
        this microbatch have added; otherwise a second one is noted, and `total_square` raises.
        """
        needs = self._needs or self.needs
        if not (needs.norm or needs.elements):
            return
        if torch.is_grad_enabled():  # in a backward with create_graph=True
            gradient = gradient.detach()
        if number in self._measured and not whole:
            self._twice = True
        if isinstance(gradient, DTensor):
            ((parts, groups),) = groups_of_parts([gradient])  # of one tensor, so that there is one pair
            self._measured[number] = norm_of(parts[0]), tuple(groups)
        else:
            self._measured[number] = norm_of(gradient), ()
        if needs.elements:
            wide = widen(gradient)
            self.elements[self.parameters[number]] = wide.square()

    def total_square(self, fresh: Iterable[bool]) -> Tensor | None:
        """Return |g|^2 over all parameters, 0-D; None if it is not needed.

        Args:
            fresh: for each parameter, whether a backward has changed its gradient since the microbatch before.

        Raises:
            RuntimeError: if a parameter has got its gradient by several backward passes, or by none.
        """
        if not any(self.needs):
            return None
        if self._twice:
            raise RuntimeError(
                f"{_EACH}, but there were several; add its losses, call backward() once, and recompute activations "
                f"with use_reentrant=False"
            )
        for number, is_fresh in enumerate(fresh):
            if is_fresh and number not in self._measured:
                raise RuntimeError(
                    f"{_EACH}, but none was seen for parameter {number}, of shape "
                    f"{tuple(self.parameters[number].shape)}; call the model that the optimizer has, and set no .grad"
                )
        # Parameters whose parts are on the same ranks have their squares summed over these ranks together. Sorted,
        # because all ranks must call the collectives in the same order.
        norms_by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
        for _, (part_norm, groups) in sorted(self._measured.items()):
            norms_by_groups.setdefault(groups, []).append(part_norm)
        totals = []
        for groups, norms in norms_by_groups.items():
            totals.append(sum_of_squares(norms))
            for group in groups:
                dist.all_reduce(totals[-1], group=group)
        return sum(totals[1:], totals[0]) if totals else torch.zeros(())


@final
class SquaresOfGrad:
    """Measures the squares of `.grad`, where that is the gradient of one microbatch; it needs no hooks."""

    def __init__(self, parameters: Parameters, needs: Callable[[], Needs | None]) -> None:
        self.parameters = parameters
        self._ask = needs
        self.elements: dict[Tensor, Tensor] = {}  # by parameter: g^2

    def clear(self) -> None:
        """Forget the microbatch."""
        self.elements = {}

    def total_square(self, fresh: Iterable[bool]) -> Tensor | None:
        """Return |g|^2 over all parameters, 0-D, None if it is not needed. Store g^2 elementwise if that is needed.

        `fresh` is not used: `.grad` has the gradient of this microbatch only.
        """
        needs = self._ask() or Needs()
        present = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = collect_gradients(present)
        if needs.elements and gradients:
            wide = list(map(widen, gradients))
            self.elements = dict(zip(present, torch._foreach_mul(wide, wide), strict=True))
        if not any(needs):
            return None
        return squared_norm(gradients) if gradients else torch.zeros(())
