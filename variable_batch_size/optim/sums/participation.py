"""Determines which parameters take part in an update: those that have a gradient on any rank.

In a world of one, a parameter takes part in each update in which it has a gradient, as in plain torch. In a larger
world the ranks must sum the same gradients. Where the host reads gradients, all are summed, and counts in each message
say which of them no rank has used. On other devices the ranks agree on the parameters at their first update, and a flag
in each message says whether one has others; there `find_unused_parameters` asks for the counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.data.plan.state import check_entries, check_items
from variable_batch_size.optim.stage import FIRST_UPDATE, Stage
from variable_batch_size.optim.tensors.late import LateReader
from variable_batch_size.optim.tensors.parameters import Parameters

_REMEDY = "pass find_unused_parameters=True to the optimizer"


@final
class Participation(Stage):
    """Determines which parameters, of all in the order of the groups, take part in an update; the same on every rank.

    A rank that has only replays in the step says nothing about them. The flag is read by a `LateReader`.
    """

    def __init__(self, parameters: Parameters, backend: Backend, *, find_unused: bool) -> None:
        self.parameters, self._backend = parameters, backend
        # Whether the ranks count in each update which parameters were used; else they agree on them once.
        self._counts = find_unused or backend.reads(parameters[0])
        self._members: tuple[bool, ...] | None = None  # for each parameter, whether it takes part, as ranks agreed
        self._constants: tuple[Tensor, Tensor] | None = None  # flags 0 and 1 on the device, (1,)
        self.forget_use()
        self._forget_flags()

    def _forget_flags(self) -> None:
        """Reset the flags by which ranks tell one another that other parameters than agreed have gradients."""
        self._flags: Tensor | None = None  # sum of the flags over ranks and updates, (1,), read some updates later
        self._late = LateReader()
        self._first_change = ""  # in words: the first parameter with another gradient, on this rank

    def forget_use(self) -> None:
        """At the beginning of a step, note that none of its microbatches has used any parameter yet."""
        # For each parameter, whether a microbatch of this step, other than a replay, has used it on this rank.
        self._used = [False] * len(self.parameters)

    def note_used(self, fresh: Sequence[bool]) -> None:
        """Note, for each parameter, whether a microbatch that counts has given it a gradient."""
        self._used = [before or now for before, now in zip(self._used, fresh, strict=True)]

    @property
    def _is_agreed_on(self) -> bool:
        """Whether the ranks agree on the parameters once, and not in each update by counts."""
        return not (self._counts or self._backend.alone)

    def meet(self, agreement: Agreement) -> None:
        """Compare before the first update, over all ranks, which parameters have gradients, and remember them.

        Raises:
            RuntimeError: on every rank, if they differ between ranks.
        """
        if not self._is_agreed_on:
            return
        # A rank that has no samples in this step sends an empty text: the other ranks know which parameters are used.
        has_no_samples = not any(self._used) and agreement.world.size > 1
        row = "" if has_no_samples else "".join("1" if used else "0" for used in self._used)
        rows = agreement.gather(FIRST_UPDATE, row)
        of_ranks = [(rank, row) for rank, row in enumerate(rows) if row]  # with samples
        first_rank, first = of_ranks[0]
        for rank, row in of_ranks:
            if row != first:
                pairs = enumerate(zip(row, first, strict=True))
                number = next(number for number, (used, used_by_first) in pairs if used != used_by_first)
                with_one, without = (rank, first_rank) if row[number] == "1" else (first_rank, rank)
                raise RuntimeError(
                    f"all ranks must use the same parameters, but rank {with_one} uses parameter {number}, of shape "
                    f"{tuple(self.parameters[number].shape)}, and rank {without} does not; {_REMEDY}"
                )
        self._members = self._members or tuple(flag == "1" for flag in first)

    def select(self) -> tuple[bool, ...]:
        """Return, for each parameter, whether its gradient is summed over the ranks; the same on every rank."""
        if self._backend.alone:
            return tuple(self._used)
        if self._counts:  # the ranks count in each update which parameters were used: until then, all of them
            return (True,) * len(self.parameters)
        return self._members or ()  # as the ranks agreed before the first update

    def message(self) -> list[Tensor]:
        """Return what the ranks have to sum: for each parameter whether this rank has used it; or one flag, (1,).

        The flag is 1 if this rank has used other parameters than agreed.
        """
        if self._backend.alone:
            return []
        if self._counts:
            like = self.parameters[0]
            return [torch.tensor(list(map(float, self._used))).to(like.device, like.dtype)]  # (parameters,)
        differs = any(self._used) and tuple(self._used) != self._members
        if differs and not self._first_change:
            self._first_change = self._first_change_in_words(self._used)
        # The flag has the dtype of a gradient that is summed, so that it needs no collective of its own.
        like = next(compress(self.parameters, self._members or ()), self.parameters[0])
        if self._constants is None:
            values = self._backend.scalars([0.0, 1.0], like)
            zero, flag = (torch.as_tensor(value, device=like.device).to(like.dtype).view(1) for value in values)
            self._constants = zero, flag
        return [self._constants[differs].clone()]

    def find_used(self, message: Sequence[Tensor]) -> Sequence[bool] | None:
        """Return for each parameter whether any rank has used it, from the sums of `message` over the ranks.

        The result is None if the parameters are as `select` returned them. If the message is a flag that other
        parameters were used than agreed, it is read from the device some updates later, and then raises RuntimeError.
        """
        if self._counts or not message:
            return [used for counts in message for used in self._backend.host(counts).abs().bool().tolist()] or None
        # The sum over updates never returns to 0, so that one read covers all of them. All ranks read the same sum
        # after the same update, so that all of them raise.
        self._flags = message[0] if self._flags is None else self._flags + message[0]
        self._raise_if_flagged(self._late.read(self._flags))
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return for each parameter whether it has a gradient, if the ranks have agreed on it; waits for the device.

        Raises:
            RuntimeError: if a rank has had gradients of other parameters than agreed.
        """
        self._raise_if_flagged(self._flags)
        return {} if self._members is None else {"has_gradient": list(map(int, self._members))}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the entry of a state that says which parameters have gradients is damaged."""
        if "has_gradient" in state:
            check_entries(state, {"has_gradient": (list,)})
            check_items(state["has_gradient"], (int,), "has_gradient")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore which parameters have gradients. Without a fitting entry the ranks compare at the next update."""
        has_gradient = state.get("has_gradient") or ()
        fits = self._is_agreed_on and len(has_gradient) == len(self.parameters)
        self._members = tuple(map(bool, has_gradient)) if fits else None
        self._forget_flags()

    def _first_change_in_words(self, has_gradient: Sequence[bool]) -> str:
        """Return, in words for an error, the first parameter that has a gradient, or none, other than agreed before."""
        pairs = zip(has_gradient, self._members or (), strict=True)
        number = next(number for number, (has_one, as_agreed) in enumerate(pairs) if has_one != as_agreed)
        which = (
            f"parameter {number}, of shape {tuple(self.parameters[number].shape)}, on rank {self._backend.world.rank}"
        )
        return f"{which} has {'one' if has_gradient[number] else 'none'}"

    def _raise_if_flagged(self, flags: Tensor | None) -> None:
        """Raise RuntimeError if the flags, summed over the ranks, say that a rank had other parameters than agreed."""
        if flags is not None and flags.cpu().abs().item() != 0:  # without a step marker, which would cut the graph
            change = self._first_change or "that has changed on another rank"
            self._forget_flags()
            raise RuntimeError(
                f"the same parameters must have gradients in every update, but {change}; {_REMEDY}, "
                "or restore the last checkpoint"
            )
