"""What an optimizer trains, and what `.grad` was at some moment: each has one value, to which the others refer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from variable_batch_size.optim.tensors.arithmetic import local_parts


def list_parameters(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    """Return the parameters of the groups in their order, each once."""
    return list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))


@final
class Parameters(tuple[Tensor, ...]):
    """The parameters of some groups in their order, each once. Groups that have changed are other `Parameters`.

    Attributes:
        groups: the parameters of each group.
    """

    groups: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of_groups(cls, groups: Sequence[dict[str, Any]]) -> Parameters:
        """Return the parameters that parameter groups have now, each once, with the parameters of each group."""
        parameters = cls(list_parameters(groups))
        parameters.groups = tuple(tuple(group["params"]) for group in groups)
        return parameters

    def are_those_of(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether groups, whose lists a user may change in place, still have these parameters, as objects."""
        return len(groups) == len(self.groups) and all(
            len(group["params"]) == len(before) and all(map(is_, group["params"], before))
            for group, before in zip(groups, self.groups, strict=True)
        )


PROBES = set[int]()  # ids of gradients that `testing.check_gradient` puts where there is none: they count as None


class Gradients(NamedTuple):
    """The gradient of each parameter at some moment: the tensor, its version, and, if they are looked at, its norm.

    The version of a tensor counts its changes in place; -1 stands for no gradient.
    """

    tensors: Sequence[Tensor | None]
    versions: list[int]
    norms: list[Tensor] | None = None

    @classmethod
    def none(cls, number: int) -> Gradients:
        """Return those of so many parameters without a gradient."""
        return cls([None] * number, [-1] * number)

    @classmethod
    def of(cls, parameters: Iterable[Tensor], *, norms: bool = False) -> Gradients:
        """Return the present gradients, with their norms if `norms` is true; None in the place of a probe."""
        gradients = [parameter.grad for parameter in parameters]
        if PROBES:  # ids of tensors that a test has put into `.grad` where there was no gradient
            gradients = [None if id(gradient) in PROBES else gradient for gradient in gradients]
        if not norms:
            return cls(gradients, versions_of(gradients))
        none = torch.zeros(())
        tensors = [none if gradient is None else gradient for gradient in gradients]
        return cls(gradients, versions_of(gradients), list(torch._foreach_norm(local_parts(tensors))))

    def first_changed(self, later: Gradients) -> int | None:
        """Return the index of the first parameter whose gradient was replaced or changed until `later`; None if none.

        A change in place raises the version of a tensor. Norms, where both have them, show changes that do not.
        """
        if self.versions != later.versions or not all(map(is_, self.tensors, later.tensors)):
            columns = zip(*self[:2], *later[:2], strict=True)
            changed = (old is not new or version != now for old, version, new, now in columns)
            return next(index for index, is_changed in enumerate(changed) if is_changed)
        if self.norms is None or later.norms is None:
            return None
        norms = zip(self.norms, later.norms, strict=True)
        return next((index for index, (old, new) in enumerate(norms) if not old.equal(new) and not old.isnan()), None)


def versions_of(gradients: Sequence[Tensor | None]) -> list[int]:
    """Return how often each tensor was changed in place, -1 for None; for a DTensor with changes of its local part."""
    versions = [-1 if gradient is None else gradient._version for gradient in gradients]
    if DTensor in set(map(type, gradients)):  # FSDP2 adds to the part of this rank
        pairs = zip(versions, gradients, strict=True)
        versions = [
            version + (gradient._local_tensor._version if isinstance(gradient, DTensor) else 0)
            for version, gradient in pairs
        ]
    return versions
