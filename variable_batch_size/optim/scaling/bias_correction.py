"""The bias correction of Adam when betas change from one update to the next.

Adam divides its averages m and v by the values that they would have if every gradient had been 1. If betas change,
these values are C_i = 1 - (product of the betas of all updates). torch uses c_i = 1 - beta_i^t, with the beta of the
present update. Its update is

    lr sqrt(c2) / c1 * m / (sqrt(v) + eps sqrt(c2)),

so torch's own kernels compute the correct update if lr is multiplied by sqrt(C2 / c2) / (C1 / c1), and eps by
sqrt(C2 / c2). torch multiplies a decoupled weight decay by lr; it is therefore divided by the same factor beforehand.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from variable_batch_size.backend import Backend
from variable_batch_size.backend.base import scalar_dtype
from variable_batch_size.data.plan.state import NUMBER, check_entries, check_items
from variable_batch_size.optim.tensors.arithmetic import local_parts
from variable_batch_size.rules import Scaling

Group = dict[str, Any]
Groups = Sequence[Sequence[Tensor]]  # the parameters of each group


@final
class BiasTerms(NamedTuple):
    """The state of one parameter group: numbers, or 0-D tensors where a device decides which updates are made."""

    updates: Any  # number of updates in the averages m and v
    c1: Any
    c2: Any


@final
class BiasCorrection:
    """C_1 and C_2 of each parameter group of an Adam, from the first update in which a rule scales betas.

    C <- beta C + (1 - beta) is the recursion of the average itself: a sum of positive numbers. It stays exact if beta
    is so close to 1 that 1 - (product) would cancel, and beta = 0 is no special case, as it is for a sum of logarithms.
    Before that update, and with any other optimizer, scalings are returned unchanged.

    Args:
        inner: the inner optimizer.
        backend: the backend of the optimizer.
        on_device: whether the terms are tensors, because the host does not know which updates were made.
        always: for each group, whether it has terms from the first update on, because a graph must not change when a
            rule begins to scale.
    """

    def __init__(
        self, inner: Optimizer, backend: Backend, *, on_device: bool = False, always: Sequence[bool] = ()
    ) -> None:
        self._inner, self._backend, self._on_device, self._always = inner, backend, on_device, always
        self._terms: dict[int, BiasTerms] = {}  # index of the group -> terms
        self._uncommitted: dict[int, BiasTerms] = {}  # terms after the update under way
        self._checked: set[int] = set()  # groups whose parameters have all made the same number of updates
        self._members: dict[int, list[Tensor]] = {}  # index of the group -> its parameters that took part last

    def correct(self, scalings: Sequence[Scaling]) -> list[Scaling]:
        """Return the scalings that torch's Adam needs to compute the correct update, one for each parameter group."""
        self._uncommitted = self._next_terms(scalings) if isinstance(self._inner, Adam) else {}
        groups = zip(self._inner.param_groups, scalings, strict=True)
        return [
            _correct_scaling(group, scaling, self._uncommitted[index]) if index in self._uncommitted else scaling
            for index, (group, scaling) in enumerate(groups)
        ]

    def commit(self, skips: Tensor | None = None) -> None:
        """After an update, store the terms that `correct` has computed for it, unless the device skips the update.

        `skips`: whether it does, 0-D; None if the host knows that the update was made.
        """
        for index, new in self._uncommitted.items():
            old = self._terms[index]
            pairs = zip(old, new, strict=True)
            self._terms[index] = new if skips is None else BiasTerms(*(torch.where(skips, *pair) for pair in pairs))
        self._uncommitted = {}

    def state_dict(self) -> dict[str, Any]:
        """Return [updates, C_1, C_2] for each group, [] for a group without terms; an empty dict if none has any."""
        terms = (self._terms.get(index, ()) for index in range(len(self._inner.param_groups)))
        plain = [[term.cpu().item() if isinstance(term, Tensor) else term for term in of_group] for of_group in terms]
        return {"bias_correction": plain} if self._terms else {}

    def regroup(self, before: Groups, after: Groups) -> None:
        """Give each new group the terms of the old group that has had its first parameter.

        Parameters that were in no group do not count.
        """
        old_index_of = {id(parameter): index for index, group in enumerate(before) for parameter in group}
        terms = {}
        for index, group in enumerate(after):
            old_indices = [old_index_of[id(parameter)] for parameter in group if id(parameter) in old_index_of]
            if old_indices and old_indices[0] in self._terms:
                terms[index] = self._terms[old_indices[0]]
        self._terms = terms
        self._checked.clear()
        self._members.clear()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the terms of the bias correction in a state are damaged."""
        if "bias_correction" in state:
            check_entries(state, {"bias_correction": (list,)})
            check_items(state["bias_correction"], (list,), "bias_correction")
            for group in state["bias_correction"]:  # must be empty, or three numbers
                has_wrong_length = len(group) not in (0, 3)
                check_items([*group, None] if has_wrong_length else group, NUMBER, "bias_correction.")  # refuses None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the terms of the bias correction of each group; a state without terms resets them."""
        groups = state.get("bias_correction", [])
        self._terms = {index: BiasTerms(*group) for index, group in enumerate(groups) if group}
        self._checked.clear()

    def _next_terms(self, scalings: Sequence[Scaling]) -> dict[int, BiasTerms]:
        """Return the number of updates, C1 and C2 after this update, by index of the groups that need a correction.

        C1 and C2 are what Adam's averages would be if every gradient had been 1: C <- beta C + (1 - beta).
        """
        terms = {}
        for index, (group, scaling) in enumerate(zip(self._inner.param_groups, scalings, strict=True)):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            begins = scaling.scales_betas or any(self._always[index : index + 1])  # `_always` may be empty
            if parameters and (index in self._terms or begins):
                if not _are_same_tensors(parameters, self._members.get(index, [])):
                    self._checked.discard(index)  # those that took no part have made fewer updates
                    self._members[index] = parameters
                updates, *c_before = self._present_terms(index, group["betas"], parameters)
                betas = _scaled_betas(group, scaling)
                c_after = [beta * c + (1 - beta) for beta, c in zip(betas, c_before, strict=True)]
                terms[index] = BiasTerms(updates + 1, *c_after)
        return terms

    def _present_terms(self, index: int, betas: Sequence[float], parameters: Sequence[Tensor]) -> BiasTerms:
        """Return the number of updates, C1 and C2 of a group before this update, at first torch's 1 - beta^updates.

        Raise ValueError if `parameters`, of the group at this index, have made different numbers of updates.
        """
        if index in self._checked or (index in self._terms and isinstance(self._terms[index].updates, Tensor)):
            return self._terms[index]
        counts = self._update_counts(parameters) | ({self._terms[index].updates} if index in self._terms else set())
        if len(counts) > 1:
            made = " or ".join(map(str, sorted(counts)))
            raise ValueError(
                f"a rule that scales betas needs the same number of updates in a group, but group {index} has {made}; "
                "put parameters that were added later, or have no gradient in some updates, into their own groups"
            )
        self._checked.add(index)
        updates = counts.pop()
        terms = self._terms.get(index, BiasTerms(updates, *(1 - float(beta) ** updates for beta in betas)))
        if self._on_device:
            (local_part,) = local_parts(parameters[:1])
            like = local_part.new_empty(0, dtype=scalar_dtype([local_part]))
            (row,) = self._backend.vectors([list(map(float, terms))], like, f"bias terms of group {index}")
            terms = BiasTerms(*row.unbind())
        self._terms[index] = terms
        return terms

    def _update_counts(self, parameters: Sequence[Tensor]) -> set[int]:
        """Return the numbers of updates that the inner optimizer has made of the parameters, with one host sync."""
        states = [self._inner.state.get(parameter) for parameter in parameters]
        steps = [torch.as_tensor(state["step"]) for state in states if state]
        zero_if_any_is_new = {0} if len(steps) < len(parameters) else set()  # some have no state yet
        if not steps:
            return zero_if_any_is_new
        stacked = torch.stack([step.to(steps[0].device) for step in steps])
        return zero_if_any_is_new | set(map(int, self._backend.host(stacked).tolist()))


def _are_same_tensors(parameters: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether both sequences have the same objects; `==` would compare the elements of tensors."""
    return len(parameters) == len(others) and all(map(operator.is_, parameters, others))


def _scaled_betas(group: Group, scaling: Scaling) -> list[float]:
    """Return the betas that a group has in this update, as floats."""
    return list(map(float, scaling.scaled_betas(group["betas"])))


def _correct_scaling(group: Group, scaling: Scaling, terms: BiasTerms) -> Scaling:
    """Return the scaling whose lr and eps make torch's Adam correct the bias of its averages if betas change.

    torch divides the averages by c = 1 - beta^t, after t updates. `terms` has t, and the C1 and C2 by which they must
    be divided.
    """
    torch_c1, torch_c2 = (1 - beta**terms.updates for beta in _scaled_betas(group, scaling))
    eps_factor = (terms.c2 / torch_c2) ** 0.5
    lr_factor = eps_factor * torch_c1 / terms.c1
    corrected = replace(scaling, lr=scaling.lr * lr_factor, eps=scaling.eps * eps_factor)
    # torch multiplies a decoupled weight decay by lr. If lr is a tensor, `HyperparameterScaling` decays by itself.
    if not group.get("decoupled_weight_decay") or isinstance(lr_factor, Tensor):
        return corrected
    return replace(corrected, weight_decay=scaling.weight_decay / lr_factor)
