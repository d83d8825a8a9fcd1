"""What moves the hyperparameters: a rule, for the length of one update; and nothing else within a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size.backend import Backend
from variable_batch_size.rules import Scaling

Group = dict[str, Any]


@final
class Rates:
    """The learning rates with which a step began, and with which it has to end."""

    def __init__(self) -> None:
        self._seen: list[object] = []

    def check(self, groups: Sequence[Group], *, inside_step: bool) -> None:
        """Look at the rates, once a microbatch.

        Raises:
            RuntimeError: when one has moved inside a step: schedulers count updates.
        """
        rates = [_identity(group.get("lr")) for group in groups]
        if inside_step and rates != self._seen:
            raise RuntimeError(
                "the learning rate must stay within a step, but it changed between two of its microbatches; call "
                "scheduler.step() only when optimizer.step() has returned True"
            )
        self._seen = rates


@contextmanager
def scaled(groups: Sequence[Group], scalings: Sequence[Scaling], backend: Backend) -> Iterator[None]:
    """Multiply each group's hyperparameters by its scaling, and put the user's own values back at the end.

    A factor on lr that is a tensor is left to `Displacement`.

    Raises:
        ValueError: when a rule scales what no group has, or takes a beta out of [0, 1).
        RuntimeError: when somebody else changes them in between.
    """
    changes = [_changes(group, scaling, backend) for group, scaling in zip(groups, scalings, strict=True)]
    _check_found(changes, scalings)
    saved = [{name: group[name] for name in change} for group, change in zip(groups, changes, strict=True)]
    try:
        for group, change in zip(groups, changes, strict=True):
            group.update(change)
        yield
        _check_untouched(groups, changes)
    finally:
        for group, values in zip(groups, saved, strict=True):
            group.update(values)


def _changes(group: Group, scaling: Scaling, backend: Backend) -> Group:
    changes: Group = {}
    if "lr" in group:
        changes["lr"] = backend.hyperparameter(group["lr"] * (1 if isinstance(scaling.lr, Tensor) else scaling.lr))
    for name, factor in (("weight_decay", scaling.weight_decay), ("eps", scaling.eps)):
        if factor != 1 and isinstance(group.get(name), (int, float, Tensor)):  # Adafactor's eps are two of another kind
            changes[name] = group[name] * factor
    if scaling.one_minus_beta != 1:
        if "betas" in group:
            changes["betas"] = tuple(checked_beta(beta, scaling) for beta in group["betas"])
        elif "alpha" in group and "lambd" not in group:  # ASGD's alpha is an exponent
            changes["alpha"] = checked_beta(group["alpha"], scaling)
    return changes


def checked_beta(beta: float, scaling: Scaling) -> float:
    """Return the scaled beta.

    Raises:
        ValueError: if it is outside [0, 1).
    """
    scaled = scaling.scaled_beta(beta)
    if not 0 <= scaled < 1:
        raise ValueError(
            f"a rule must leave every beta in [0, 1), but the factor {scaling.one_minus_beta:g} on 1 - beta takes "
            f"{beta:g} to {scaled:g}; limit the largest batch size of the trace, or choose a beta nearer to 1"
        )
    return scaled


def _check_untouched(groups: Sequence[Group], changes: Sequence[Group]) -> None:
    for group, change in zip(groups, changes, strict=True):
        if moved := [name for name, value in change.items() if group[name] is not value]:
            raise RuntimeError(
                f"hyperparameters must stay within an update, but {' and '.join(moved)} changed inside the inner "
                f"optimizer's step(), as by a scheduler in one of its hooks; call scheduler.step() when "
                f"optimizer.step() has returned True"
            )


def _check_found(changes: Sequence[Group], scalings: Sequence[Scaling]) -> None:
    asked = {
        "lr": any(isinstance(scaling.lr, Tensor) or scaling.lr != 1 for scaling in scalings),
        "weight_decay": any(scaling.weight_decay != 1 for scaling in scalings),
        "eps": any(scaling.eps != 1 for scaling in scalings),
        "betas": any(scaling.one_minus_beta != 1 for scaling in scalings),
    }
    found = {"betas" if name == "alpha" else name for change in changes for name in change}
    if missing := [name for name, wanted in asked.items() if wanted and name not in found]:
        raise ValueError(
            f"a rule can scale only what the optimizer has, but no parameter group has {' or '.join(missing)}; use "
            f"another rule with this optimizer"
        )


def _identity(lr: object) -> object:
    """Shows whether a rate was changed, without reading it from a device."""
    return (id(lr), lr._version) if isinstance(lr, Tensor) else lr


@final
class Displacement:
    """A factor on lr that nobody may read: w = w_old + factor (w_new - w_old) after the optimizer's own step.

    It is right where an optimizer's change is proportional to lr. It happens in the first of the step's post-hooks, so
    that those which are registered later see the new weights; pre-hooks see the reference lr.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._moves: list[tuple[list[Tensor], list[Tensor], Tensor]] = []  # parameters, what they were, factor
        inner.register_step_post_hook(self._displace)

    @contextmanager
    def by(self, groups: Sequence[Group], scalings: Sequence[Scaling]) -> Iterator[None]:
        """For the length of a step, where a group's factor on lr is a tensor."""
        for group, scaling in zip(groups, scalings, strict=True):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters and isinstance(scaling.lr, Tensor):
                self._moves.append((parameters, [parameter.detach().clone() for parameter in parameters], scaling.lr))
        try:
            yield
        finally:
            self._moves.clear()

    def _displace(self, *_: object) -> None:
        with torch.no_grad():
            for parameters, before, factor in self._moves:
                torch._foreach_sub_(parameters, before)
                torch._foreach_mul_(parameters, factor)
                torch._foreach_add_(parameters, before)
