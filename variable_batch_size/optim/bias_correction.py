"""Adam's bias correction where betas change from one update to the next.

Adam divides its averages m and v by what they would hold if every gradient had been 1. For betas that change that is
C_i = 1 - (product of the betas that were used); torch takes c_i = 1 - beta_i^t, with the beta of the present update.
Written out, torch's update is

    lr sqrt(c2) / c1 * m / (sqrt(v) + eps sqrt(c2)),

so that the right one needs no kernel of its own: torch makes it with lr times sqrt(C2 / c2) / (C1 / c1), and eps
times sqrt(C2 / c2). A decay that is decoupled is multiplied by lr, and is divided by the same number beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from variable_batch_size.backend import Backend
from variable_batch_size.optim.scaling import Group, checked_beta
from variable_batch_size.rules import Scaling


@final
class Averages(NamedTuple):
    """Of one parameter group: how many updates its averages hold, and C_1 and C_2."""

    updates: int
    first: float
    second: float


@final
class BiasCorrection:
    """C_1 and C_2 of an Adam's parameter groups, from the first update at which a rule scales 1 - beta.

    C <- beta C + (1 - beta), the average's own recursion: a sum of positive numbers, so it is exact also where beta is
    so close to 1 that 1 - product would cancel, and a beta of 0 is no special case, as it is for a sum of logarithms.
    Before that update, with a rule that leaves the betas alone, and around any other optimizer it does nothing.
    """

    def __init__(self, inner: Optimizer, backend: Backend) -> None:
        self._inner = inner
        self._backend = backend
        self._groups: dict[int, Averages] = {}  # by the number of the group
        self._checked: set[int] = set()  # groups whose parameters were seen to have made the same updates
        self._of = 0  # so many groups, when they were: with a new one, others may get parameters that begin

    @contextmanager
    def corrected(self, scalings: Sequence[Scaling]) -> Iterator[list[Scaling]]:
        """One scaling a group, as torch's Adam has to get it; the update counts when the block ends without error.

        Raises:
            ValueError: when the parameters of a group have not all made the same updates.
        """
        after = self._after(scalings) if isinstance(self._inner, Adam) else {}
        groups = list(zip(self._inner.param_groups, scalings, strict=True))
        yield [_correct(*pair, after[i]) if i in after else pair[1] for i, pair in enumerate(groups)]
        self._groups.update(after)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, a list for each group; nothing where nothing has begun."""
        groups = [list(self._groups.get(number, ())) for number in range(len(self._inner.param_groups))]
        return {"bias_correction": groups} if self._groups else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; from nothing, begin anew."""
        groups = state.get("bias_correction", [])
        self._groups = {number: Averages(*group) for number, group in enumerate(groups) if group}
        self._checked.clear()

    def _after(self, scalings: Sequence[Scaling]) -> dict[int, Averages]:
        """What the averages of the groups that this update changes will hold after it."""
        after = {}
        if self._of != len(self._inner.param_groups):
            self._of = len(self._inner.param_groups)
            self._checked.clear()
        for number, (group, scaling) in enumerate(zip(self._inner.param_groups, scalings, strict=True)):
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            if members and (number in self._groups or scaling.one_minus_beta != 1):
                updates, *held = self._before(number, group["betas"], members)
                weights = [beta * c + (1 - beta) for beta, c in zip(_betas(group, scaling), held, strict=True)]
                after[number] = Averages(updates + 1, *weights)
        return after

    def _before(self, number: int, betas: Sequence[float], members: Sequence[Tensor]) -> Averages:
        """What a group's averages hold; at first, as torch had it until then."""
        if number in self._checked:
            return self._groups[number]
        counts = self._counts(members) | ({self._groups[number].updates} if number in self._groups else set())
        if len(counts) > 1:
            raise ValueError(
                f"betas that change need groups whose parameters have all made the same updates, but those of "
                f"parameter group {number} have made {' or '.join(map(str, sorted(counts)))}; give the parameters that "
                f"joined later a group of their own"
            )
        self._checked.add(number)
        updates = counts.pop()
        begun = Averages(updates, *(1 - float(beta) ** updates for beta in betas))
        return self._groups.setdefault(number, begun)

    def _counts(self, members: Sequence[Tensor]) -> set[int]:
        """How many updates the inner optimizer has made of each parameter, in one read."""
        states = [self._inner.state.get(parameter) for parameter in members]
        steps = [torch.as_tensor(state["step"]) for state in states if state]
        fresh = {0} if len(steps) < len(members) else set()
        if not steps:
            return fresh
        return fresh | set(map(int, self._backend.host(torch.stack([s.to(steps[0].device) for s in steps])).tolist()))


def _betas(group: Group, scaling: Scaling) -> list[float]:
    return [float(checked_beta(beta, scaling)) for beta in group["betas"]]


def _correct(group: Group, scaling: Scaling, after: Averages) -> Scaling:
    torchs = [1 - beta**after.updates for beta in _betas(group, scaling)]
    on_eps = (after.second / torchs[1]) ** 0.5
    on_lr = on_eps * torchs[0] / after.first
    decay = scaling.weight_decay / on_lr if group.get("decoupled_weight_decay") else scaling.weight_decay
    return replace(scaling, lr=scaling.lr * on_lr, eps=scaling.eps * on_eps, weight_decay=decay)
