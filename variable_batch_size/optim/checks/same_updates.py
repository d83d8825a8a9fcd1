"""Checks that all ranks make the same update, by two numbers that are summed together with the gradients.

A rank sends x and x^2, where x < M is a checksum of the facts of its update. W ranks have the same x if and only if
W sum x^2 = (sum x)^2, by Cauchy's and Schwarz's inequality. M is the largest for which float32 holds each of the sums.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size.backend import Backend
from variable_batch_size.backend.base import scalar_dtype
from variable_batch_size.optim.stage import Stage, UpdateUnderWay
from variable_batch_size.optim.tensors.late import READ_EVERY, copy_later

Facts = dict[str, Any]  # of an update, by their names in an error

_EXACT = 2**24  # up to here float32 holds every whole number
_NUMBERS = frozenset({bool, int, float})


class RanksDifferError(RuntimeError):
    """The facts of an update differ between ranks.

    Attributes:
        updates: the facts, on this rank, of the updates in which the ranks differ.
        made: whether these updates were made, so that the weights have changed since.
    """

    def __init__(self, updates: Iterable[Facts], *, made: bool) -> None:
        super().__init__(
            "all ranks must make the same updates, but they differ in position, hyperparameters or what is trained; "
            "set these alike, and restore an earlier checkpoint on all ranks"
        )
        self.updates, self.made = list(updates), made


def modulus(ranks: int) -> int:
    """Return the largest M for which `ranks` squares of numbers below M have a sum that float32 holds: at most 2^24."""
    return math.isqrt(_EXACT // ranks) + 1


class _Sums(NamedTuple):
    facts: Facts
    read: Callable[[], Tensor]  # returns the sums of x and x^2 over the ranks, (2,)


@final
class SameUpdates(Stage):
    """Compares the ranks of a job, update by update: before it where the host reads, else later.

    Args:
        inner: the optimizer whose hyperparameters are compared.
        backend: how the ranks that share a batch communicate.
    """

    name, whole = "facts", True

    def __init__(self, inner: Optimizer, backend: Backend) -> None:
        job = backend.job  # communicates between all ranks, also where only some of them share a batch
        self._inner, self._backend, self._job, self._ranks = inner, backend, job, job.world.size
        self._apart = job is not backend  # not all ranks of the job share a batch: the number has a sum of its own
        self._modulus = modulus(job.world.size)
        self.forget()

    def forget(self) -> None:
        """Discard what was to be compared: before the next update the ranks compare everything by other means."""
        self._facts: Facts = {}  # of the update under way
        self._unread = list[_Sums]()  # of earlier ones, on a device that is not read at once

    def begin(self, update: UpdateUnderWay) -> None:
        """Add the hyperparameters, and which parameters are trained, to what ranks compare in an update.

        Other stages may add to the same dict, `update.facts`.
        """
        self._facts = update.facts
        self._facts |= numbers_of_groups(self._inner.param_groups)
        trained = [number for number, parameter in enumerate(update.parameters) if parameter.requires_grad]
        self._facts["parameters that require gradients"] = trained

    def part(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return [x, x^2], (2,), of a checksum x of the update, which the ranks sum together with the gradients.

        The sums show whether x is equal on all ranks. Return nothing if not all ranks of the job sum the message:
        `reduce` then sums the numbers by itself.
        """
        x = zlib.crc32(repr(self._facts).encode()) % self._modulus
        example = torch.empty((), dtype=scalar_dtype(like), device=like[0].device)
        (self._number,) = self._backend.vectors([(x, x * x)], example, "")
        return [] if self._apart else [self._number]

    def reduce(self, update: UpdateUnderWay) -> None:
        """Compare the ranks by the sums over them of what `part` has returned.

        Raises:
            RanksDifferError: on every rank, if the ranks differ.
        """
        message = update.message[self.name]
        if self._apart:
            self._job.all_reduce_sum([self._number])
            message = [self._number]
        for sums in message:
            self._compare(sums)

    def _compare(self, sums: Tensor) -> None:
        """Compare the ranks by the sums of x and x^2, (2,), if the host reads them at once. Otherwise store them."""
        update = _Sums(self._facts, copy_later(sums))
        if self._backend.reads(sums):
            if self._differs(update):
                raise RanksDifferError([self._facts], made=False)
            return
        self._unread.append(update)
        if len(self._unread) == 2 * READ_EVERY:  # the device has computed the older half, and the host does not wait
            older, self._unread = self._unread[:READ_EVERY], self._unread[READ_EVERY:]
            self._check_made(older)

    def state_dict(self) -> dict[str, Any]:
        """Return no entries. Before a state is saved, compare all updates that were not read from the device yet.

        Raises:
            RanksDifferError: if the ranks have differed.
        """
        made, self._unread = self._unread, []
        self._check_made(made)
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Discard what was to be compared: before the next update the ranks compare everything by other means."""
        self.forget()

    def _check_made(self, updates: Sequence[_Sums]) -> None:
        """Read from the device how updates compare, some updates after them: raise RanksDifferError if ranks differ."""
        differing = [update.facts for update in updates if self._differs(update)]
        if differing:
            raise RanksDifferError(differing, made=True)

    def _differs(self, update: _Sums) -> bool:
        """Return whether the ranks differ in an update, by the sums over them of a checksum x and of x^2."""
        sum_of_x, sum_of_squares = update.read().tolist()
        return bool(self._ranks * sum_of_squares != sum_of_x**2)  # equal only if all ranks have the same x


def numbers_of_groups(groups: Sequence[Mapping[str, Any]]) -> Facts:
    """Return the hyperparameters that are Python numbers, or tuples of them, as floats, by name and group."""
    facts: Facts = {}
    for number, group in enumerate(groups):
        for name, value in sorted(group.items()):
            as_floats = _as_floats(value)  # None if it is no number
            if as_floats is not None:
                facts[f"{name} of parameter group {number}"] = as_floats
    return facts


def _as_floats(value: Any) -> float | tuple[float, ...] | None:
    """Return a number, or a tuple of numbers, as floats, so that equal ones have equal texts; None for others."""
    numbers: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    if any(number.__class__ not in _NUMBERS for number in numbers):
        return None
    floats = tuple([number + 0.0 for number in numbers])  # + 0.0 also makes -0.0 equal to 0.0 in its text
    return floats if numbers is value else floats[0]
