"""Checks, in the first update, whether the inner optimizer trains parameters that are in none of its groups.

An optimizer may have another one inside, and not register the parameters of that one. Their gradients would not be
summed over the ranks, not be clipped and not be cleared, and their learning rate would not be scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, final

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from variable_batch_size.optim.stage import LoopStage, Stage, UpdateUnderWay
from variable_batch_size.optim.tensors.arithmetic import local_parts
from variable_batch_size.optim.tensors.hooks import bare
from variable_batch_size.optim.tensors.parameters import versions_of

_UPDATES = 5  # number of updates that are checked, if parameters are written but keep their values


class _Seen(NamedTuple):
    """A parameter that is in no group, as it was before the inner optimizer's step."""

    name: str
    parameter: Tensor
    version: int
    value: Tensor


@final
class Owners(Stage, LoopStage):
    """Looks, in the first update, for parameters that change within the inner optimizer's step and are in no group.

    They are looked for among those of the model, or without one in the graph of the first loss of
    `optimizer.backward()`.

    Args:
        inner: the inner optimizer.
        module: the model, if it is known.
    """

    def __init__(self, inner: Optimizer, module: Module | None) -> None:
        self._inner = inner
        module = bare(module)
        self._named: list[tuple[str, Tensor]] | None = None if module is None else [*module.named_parameters()]
        self._done, self._updates = False, 0  # whether the check is complete; number of updates that were checked
        self._seen: list[_Seen] = []  # copies of parameters, from before the step of the update under way

    def begin_backward(self, member: object, loss: Tensor, *, divided: bool) -> None:
        """Before the first `backward()`, find the parameters in the graph of its loss, if the model is not known."""
        if self._named is None and not self._done:
            self._named = [(f"of shape {tuple(leaf.shape)}", leaf) for leaf in _leaves(loss)]

    def begin_step(self, update: UpdateUnderWay) -> None:
        """Copy, before the inner optimizer's step, parameters that have a gradient and are in none of its groups.

        `end` compares: a wrapped optimizer may train them by another optimizer inside it.
        """
        if self._done:
            return
        in_groups = {*map(id, update.parameters)}
        not_in_groups = [(name, parameter) for name, parameter in self._named or [] if id(parameter) not in in_groups]
        named = [(name, parameter) for name, parameter in not_in_groups if parameter.grad is not None]
        versions = versions_of([parameter for _, parameter in named])
        self._seen = [
            _Seen(name, parameter, version, parameter.detach().clone())
            for (name, parameter), version in zip(named, versions, strict=True)
        ]

    def end(self, update: UpdateUnderWay) -> None:
        """Raise RuntimeError if the inner optimizer's step has changed a parameter that is in none of its groups."""
        copied, self._seen, written = self._seen, [], False  # as they were before the step
        for name, parameter, version, value in copied:
            written |= versions_of([parameter]) != [version]
            if not _is_equal(parameter.detach(), value):
                raise RuntimeError(
                    f"{type(self._inner).__name__}.step() has changed parameter {name}, but it is in none of its "
                    "param_groups; register it, or wrap each optimizer by itself, and create or restore the model: "
                    "the first update was made"
                )
        if update.skipped is not True:
            self._updates += 1
        # A parameter that was written and kept its value may have a learning rate of 0, as in a warm-up: look again.
        looks_again = written and self._updates < _UPDATES
        if self._updates and not looks_again:
            self._done, self._named = True, None


def _is_equal(now: Tensor, before: Tensor) -> bool:
    """Return whether two tensors have equal elements, where two nan count as equal; compare this rank's parts only."""
    (now,), (before,) = local_parts([now]), local_parts([before])
    return bool(((now == before) | ((now != now) & (before != before))).all())  # only nan differs from itself


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the parameters that the graph of a loss reaches, each once."""
    visited, nodes = set[Any](), [loss.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)  # only the node that accumulates into a parameter has it
        if leaf is not None:
            yield leaf
        nodes += [following for following, _ in node.next_functions]
