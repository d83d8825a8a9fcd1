"""A rule's factors on an optimizer's parameter groups, for the length of one update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from variable_batch_size.backend import Backend
from variable_batch_size.rules import Scaling

Group = dict[str, Any]


@contextmanager
def scaled(groups: Sequence[Group], scaling: Scaling, backend: Backend) -> Iterator[None]:
    """Multiply every group's hyperparameters, and put the user's own values back at the end.

    Raises:
        ValueError: when a rule scales what no group has, or takes a beta out of [0, 1).
    """
    changes = [_changes(group, scaling, backend) for group in groups]
    _check_found(changes, scaling)
    saved = [{name: group[name] for name in change} for group, change in zip(groups, changes, strict=True)]
    try:
        for group, change in zip(groups, changes, strict=True):
            group.update(change)
        yield
    finally:
        for group, values in zip(groups, saved, strict=True):
            group.update(values)


def _changes(group: Group, scaling: Scaling, backend: Backend) -> Group:
    changes: Group = {}
    if "lr" in group:
        changes["lr"] = backend.number(group["lr"] * scaling.lr)
    for name, factor in (("weight_decay", scaling.weight_decay), ("eps", scaling.eps)):
        if name in group and factor != 1:
            changes[name] = group[name] * factor
    if scaling.one_minus_beta != 1:
        if "betas" in group:
            changes["betas"] = tuple(_beta(beta, scaling.one_minus_beta) for beta in group["betas"])
        elif "alpha" in group:
            changes["alpha"] = _beta(group["alpha"], scaling.one_minus_beta)
    return changes


def _beta(beta: float, factor: float) -> float:
    moved = 1 - factor * (1 - beta)
    if not 0 <= moved < 1:
        raise ValueError(
            f"a rule must leave every beta in [0, 1), but the factor {factor:g} on 1 - beta takes {beta:g} to "
            f"{moved:g}; cut the largest batch size of the trace, or choose a beta nearer to 1"
        )
    return moved


def _check_found(changes: Sequence[Group], scaling: Scaling) -> None:
    asked = {
        "lr": scaling.lr != 1,
        "weight_decay": scaling.weight_decay != 1,
        "eps": scaling.eps != 1,
        "betas": scaling.one_minus_beta != 1,
    }
    found = {"betas" if name == "alpha" else name for change in changes for name in change}
    if missing := [name for name, wanted in asked.items() if wanted and name not in found]:
        raise ValueError(
            f"a rule can scale only what the optimizer has, but no parameter group has {' or '.join(missing)}; use "
            f"another rule with this optimizer"
        )
