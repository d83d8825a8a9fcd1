"""Does the inner optimizer train parameters that are in none of its groups? The first update shows it.

An optimizer that registers some parameters and steps the others by another one within leaves those without a sum over
the ranks, a limit of their norm, a scaled learning rate, and cleared gradients.
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

_UPDATES = 5  # that are looked at, if one writes parameters and leaves their values


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
        self._done, self._updates = False, 0
        self._seen: list[_Seen] = []

    def begin_backward(self, member: object, loss: Tensor, *, divided: bool) -> None:
        """Keep the leaves of the first loss, of a training without a model."""
        if self._named is None and not self._done:
            self._named = [(f"of shape {tuple(leaf.shape)}", leaf) for leaf in _leaves(loss)]

    def begin_step(self, update: UpdateUnderWay) -> None:
        """Keep the values of those that have a gradient, and are in no group."""
        if self._done:
            return
        known = {*map(id, update.parameters)}
        others = [pair for pair in self._named or [] if id(pair[1]) not in known and pair[1].grad is not None]
        versions = versions_of([parameter for _, parameter in others])
        self._seen = [
            _Seen(name, parameter, version, parameter.detach().clone())
            for (name, parameter), version in zip(others, versions, strict=True)
        ]

    def end(self, update: UpdateUnderWay) -> None:
        """Raise RuntimeError if one of them has changed."""
        seen, self._seen, written = self._seen, [], False
        for name, parameter, version, value in seen:
            written |= versions_of([parameter]) != [version]
            if not _is_equal(parameter.detach(), value):
                raise RuntimeError(
                    f"{type(self._inner).__name__}.step() has changed parameter {name}, but it is in none of its "
                    "param_groups; register it, or wrap each optimizer by itself, and create or restore the model: "
                    "the first update was made"
                )
        self._updates += update.skipped is not True
        if self._updates and not (written and self._updates < _UPDATES):  # else the rate may have been 0
            self._done, self._named = True, None


def _is_equal(now: Tensor, before: Tensor) -> bool:
    """Return whether two tensors are equal, also where both are nan."""
    (now,), (before,) = local_parts([now]), local_parts([before])
    return bool(((now == before) | ((now != now) & (before != before))).all())


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the parameters that the graph of a loss reaches, each once."""
    known, nodes = set[Any](), [loss.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        nodes += [following for following, _ in node.next_functions]
