"""Gradients whose sum is the same to the last bit in any world: `CustomSampler(reproducible=True)`.

The gradient of the sum of the losses of each microbatch becomes integers, see `limbs.py`, which are added over
microbatches and ranks; the cut into microbatches does not depend on the world. What else is measured of a microbatch
travels in a slot of its own, see `ByMicrobatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.backend import Backend
from variable_batch_size.data.batches import Batch
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.message import Message
from variable_batch_size.optim.reproducible import limbs
from variable_batch_size.optim.sums.plain import TakenOut
from variable_batch_size.optim.sums.ranks import Ranks
from variable_batch_size.optim.tensors.arithmetic import collect_gradients
from variable_batch_size.optim.tensors.parameters import Parameters

RANKS = 1000  # at most, so that the sums of lo do not wrap


@final
class IntegerSum(TakenOut):
    """Adds each microbatch to integers, which the backend sums over the ranks by one collective."""

    def __init__(self, ranks: Ranks, parameters: Parameters, **options: Any) -> None:
        if ranks.number > RANKS:
            raise value_error(f"reproducible=True needs at most {RANKS} ranks", ranks.number, "train on fewer")
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            requirement = "reproducible=True needs a model that every rank has whole"
            raise type_error(requirement, parameters[0], "train the bare model, or omit reproducible=True")
        if any(parameter.is_complex() for parameter in parameters):
            requirement, remedy = "reproducible=True needs real parameters", "use torch.view_as_real, or omit it"
            raise value_error(requirement, "complex ones", remedy)
        size = sum(parameter.numel() for parameter in parameters)
        self._sums = parameters[0].new_empty((2, size), dtype=torch.int64)  # memory that steps share
        super().__init__(ranks, parameters, **options)

    def _loss_factor(self, microbatch: Microbatch) -> float:
        return self._factor_as_is(microbatch)

    def _create_message(self) -> Message:
        return ByMicrobatch(self._backend)

    def _begin_step(self) -> None:
        super()._begin_step()
        self._added = 0  # number of microbatches of this rank in the sums
        self._largest: Tensor | None = None  # largest absolute value of an element of their gradients, 0-D

    def _accumulate(self, microbatch: Microbatch, following: Microbatch | None) -> None:
        """Add the weighted gradients of a microbatch to integers, whose sum has no order, and drop them from `.grad`.

        A parameter without a gradient adds 0.
        """
        present = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradient_of = dict(zip(present, collect_gradients(present), strict=True))
        self._set_grads(None)
        # A microbatch without samples, which has weight 0, may have gradients that are not finite.
        if not gradient_of or not (microbatch.samples or self._backend.static_graph):
            return
        gradients = [gradient_of[key] if key in gradient_of else torch.zeros_like(key) for key in self.parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        weight = self._backend.scalar(microbatch.samples / self._present_factor(microbatch), flat, "microbatch")
        if self._added % limbs.CARRIED == limbs.CARRIED - 1:  # carry to the upper integers before lower ones overflow
            limbs.carry(self._sums)
        largest = limbs.add(self._sums, flat, weight, first=self._added == 0)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        self._added += 1

    def _reduce(self, batch: Batch, factor: float | None) -> list[Tensor]:
        """Sum the integers over the ranks, and leave `factor` times the mean gradient in `.grad`.

        All of it is nan if a number of any rank was out of the range that integers represent.
        """
        takes_part = self._participation.select()  # for each parameter, whether it is summed over the ranks
        sums = self._sums
        if self._added == 0:  # this rank had replays only, and the memory still has the sums of the step before
            sums.zero_()
        if self._ranks.number > 1:
            limbs.carry(sums)  # so that the sums of the lower integers over the ranks cannot overflow
        like = sums.new_zeros((), dtype=torch.float64)
        limit = self._backend.scalar(limbs.LARGEST / batch.batch_size, like, "range")
        # Not `largest >= limit`, which is false for nan. The ranks sum it: 0 if all numbers are in range on all ranks.
        out_of_range = (~((like if self._largest is None else self._largest) < limit)).long().view(1)
        self._backend.mark_step()
        used = self._participation.message()
        flags = [tensor.long() for tensor in used]  # one dtype, one collective: XLA:CPU may run several in any order
        self._ranks.all_reduce([sums, out_of_range, *flags, *self._collect_message(batch)])
        limbs.carry(sums)
        divisor = 1 if self._divided else batch.batch_size
        weight = like + self._backend.scalar(float(self._remaining_factor(factor)) / divisor, like, "update")
        self._set_means(torch.where(out_of_range == 0, weight, torch.nan))
        used = [flag.to(tensor.dtype) for flag, tensor in zip(flags, used, strict=True)]
        self._clear_excluded(self._participation.find_used(used) or takes_part)
        return collect_gradients(self.parameters)

    def _set_means(self, weight: Tensor) -> None:
        """Set `.grad` of each parameter to its summed integers, converted to floats, times `weight`, 0-D."""
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, total in zip(self.parameters, torch.split(self._sums, sizes, 1), strict=True):
            mean = limbs.value(total, weight, parameter.new_empty(parameter.numel()))
            parameter.grad = mean.view_as(parameter)

    def _common_scale(self, scale: Tensor) -> Tensor:
        """Refuse a `GradScaler`.

        Raises:
            ValueError: always.
        """
        requirement = "reproducible=True needs gradients that nothing scales by what single microbatches overflow"
        raise value_error(requirement, "a GradScaler", "train in bfloat16, by torch.autocast, without a scaler")


@final
class ByMicrobatch(Message):
    """Keeps what is measured of each microbatch apart until the ranks have it all, so that no rounding depends on them.

    The bits of a table with a row for each microbatch of the update are summed with the zeros of other ranks; where a
    graph is compiled, which would be another one for each number of rows, integers are added as for the gradients.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self._rows: dict[int, Tensor] = {}  # by number of the microbatch, (numbers,)
        self._integers: Tensor | None = None  # their sums, (2, numbers), where a graph is compiled
        self._widths: dict[str, list[int]] = {}  # of the parts, by name
        self._table: list[Tensor] = []  # that the ranks sum, until the sums are asked for

    def count(self, microbatch: Microbatch, like: Sequence[Tensor]) -> None:
        """After each microbatch, move what stages have measured of it to a row of its own, and clear these stages.

        Rows are added later in the order of the microbatches, whatever ranks had them: so all bits are the same.
        """
        measured = {entry.name: entry for entry in self.entries if entry.by_microbatch}
        parts = {name: [part.to(torch.float64) for part in entry.part(like)] for name, entry in measured.items()}
        self._widths = {name: list(map(len, parts_of_entry)) for name, parts_of_entry in parts.items()}
        flat = [part for parts_of_entry in parts.values() for part in parts_of_entry]  # 1-D tensors of float64
        if flat and self._backend.static_graph:
            row = torch.cat(flat)
            if self._integers is None:
                self._integers = row.new_zeros((2, len(row)), dtype=torch.int64)
            limbs.add(self._integers, row)
        elif flat and microbatch.samples:  # without samples it does not count
            self._rows[microbatch.number] = torch.cat(flat)
        for entry in measured.values():
            entry.clear()

    def collect(self, microbatches: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return what the ranks sum in place: the numbers of each microbatch, then the other entries, all int64.

        What was measured is a table with a row for each microbatch of the update, (microbatches, numbers). A rank has
        zeros in the rows of other ranks. So the sum of the bits of float64, read as int64, is the row of the one rank
        that has it. Where a graph is compiled, it is the pair of integers that `count` has added to. Other entries must
        be whole numbers, whose sum has no order.

        Raises:
            ValueError: if an entry that is not measured by microbatch has floats.
        """
        self._sums = {}
        for entry in self.entries:
            if not entry.by_microbatch:
                parts = entry.part(like)
                if not entry.whole and any(part.is_floating_point() for part in parts):
                    raise value_error(
                        "reproducible=True needs sums without an order",
                        f"floats of the stage {entry.name!r}",
                        "say by_microbatch = True in its class if they are of microbatches, or whole = True",
                    )
                self._sums[entry.name] = [part.long() for part in parts]
        self._table = []
        width = sum(map(sum, self._widths.values()))  # numbers of a microbatch
        if self._integers is not None:
            self._table = [self._integers]
        elif width:
            table = like[0].new_zeros((microbatches, width), dtype=torch.float64)
            for number, row in self._rows.items():  # those of the microbatches that count follow one another
                table[number % microbatches] = row
            self._table = [table.view(torch.int64)]
        return [*self._table, *(tensor for sums in self._sums.values() for tensor in sums)]

    def __getitem__(self, name: str) -> list[Tensor]:
        """Return the sums over the ranks of the entry `name`: of a stage that measures microbatches, or of another.

        The rows of microbatches, which the ranks have exchanged, are added in their order at the first call.
        """
        for table in self._table if name in self._widths else ():  # one table, or none after the first call
            if self._integers is not None:
                total = limbs.value(table, 1.0, torch.empty_like(table[0], dtype=torch.float64))
            else:
                total = table.view(torch.float64).sum(0)
            parts = iter(torch.split(total, [width for widths in self._widths.values() for width in widths]))
            self._sums |= {entry: [next(parts) for _ in widths] for entry, widths in self._widths.items()}
            self._table = []
        return super().__getitem__(name)

    def clear(self) -> None:
        """Forget what was measured in a step, after its update or because it starts over."""
        super().clear()
        self._rows, self._integers = {}, None
