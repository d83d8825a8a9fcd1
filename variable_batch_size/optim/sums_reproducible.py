"""Gradients whose sum is the same to the last bit in any world: `CustomSampler(reproducible=True)`.

The gradient of the sum of the losses of each microbatch becomes integers, see `limbs.py`, which are added over
microbatches and ranks; the cut into microbatches does not depend on the world. What else is measured of a microbatch
travels in a slot of its own, see `StepGradient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.backend import Backend
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim import limbs
from variable_batch_size.optim.sums import Others, TakenOut
from variable_batch_size.optim.tensors import collect_gradients

RANKS = 1000  # at most, so that the sums of lo do not wrap


@final
class Reproducible(TakenOut):
    """Adds each microbatch to integers, which the backend sums over the ranks by one collective."""

    by_microbatch = True

    def __init__(self, backend: Backend, **options: Any) -> None:
        if backend.world.size > RANKS:
            raise value_error(f"reproducible=True needs at most {RANKS} ranks", backend.world.size, "train on fewer")
        super().__init__(backend, **options)

    def use_parameters(self, parameters: Sequence[Tensor], *, keep: bool = False) -> None:
        """Sum the gradients of these parameters from now on."""
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            requirement = "reproducible=True needs a model that every rank has whole"
            raise type_error(requirement, parameters[0], "train the bare model, or omit reproducible=True")
        if any(parameter.is_complex() for parameter in parameters):
            requirement, remedy = "reproducible=True needs real parameters", "use torch.view_as_real, or omit it"
            raise value_error(requirement, "complex ones", remedy)
        size = sum(parameter.numel() for parameter in parameters)
        self._sums = parameters[0].new_empty((2, size), dtype=torch.int64)  # memory that steps share
        super().use_parameters(parameters, keep=keep)

    def _begin_step(self) -> None:
        super()._begin_step()
        self._added = 0  # microbatches of this rank
        self._largest: Tensor | None = None  # absolute value of an element of any of them, 0-D

    def _accumulate(self, microbatch: Microbatch, following: Microbatch | None) -> None:
        """Add the weighted gradients to the integers, 0 where a parameter has none, and drop them from `.grad`."""
        present = [parameter for parameter in self.parameters if parameter.grad is not None]
        found = dict(zip(present, collect_gradients(present), strict=True))
        self._set_grads(None)
        if not found or not (microbatch.samples or self._backend.static_graph):  # a replay may be non-finite
            return
        gradients = [found[one] if one in found else torch.zeros_like(one) for one in self.parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        weight = self._backend.scalar(microbatch.samples / self._present_factor(microbatch), flat, "microbatch")
        if self._added % limbs.CARRIED == limbs.CARRIED - 1:
            limbs.carry(self._sums)
        largest = limbs.add(self._sums, flat, weight, first=self._added == 0)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        self._added += 1

    def finish(self, batch_size: int, factor: float | None, others: Others) -> list[Tensor]:
        """Leave `factor` times the mean gradient in `.grad`; all of it is nan if a number was out of range."""
        members = self._participation.select(self._used)
        sums = self._sums
        if self._added == 0:
            sums.zero_()
        if self.ranks > 1:
            limbs.carry(sums)
        like = sums.new_zeros((), dtype=torch.float64)
        limit = self._backend.scalar(limbs.LARGEST / batch_size, like, "range")
        out_of_range = (~((like if self._largest is None else self._largest) < limit)).long().view(1)
        self._backend.mark_step()
        message = self._participation.message(self._used, replay=not any(self._used))
        flags = [tensor.long() for tensor in message]  # one dtype, one collective: XLA:CPU may run several in any order
        self.all_reduce([sums, out_of_range, *flags, *others()])
        limbs.carry(sums)
        divisor = 1 if self._weighted else batch_size
        weight = like + self._backend.scalar(float(self._remaining_factor(factor)) / divisor, like, "update")
        self._set_means(torch.where(out_of_range == 0, weight, torch.nan))
        message = [flag.to(tensor.dtype) for flag, tensor in zip(flags, message, strict=True)]
        self._clear_excluded(self._participation.find_used(message) or members)
        return collect_gradients(self.parameters)

    def _set_means(self, weight: Tensor) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, total in zip(self.parameters, torch.split(self._sums, sizes, 1), strict=True):
            mean = limbs.value(total, weight, parameter.new_empty(parameter.numel()))
            parameter.grad = mean.view_as(parameter)

    def common_scale(self, scale: Tensor) -> Tensor:
        """Refuse a `GradScaler`.

        Raises:
            ValueError: always.
        """
        requirement = "reproducible=True needs gradients that nothing scales by what single microbatches overflow"
        raise value_error(requirement, "a GradScaler", "train in bfloat16, by torch.autocast, without a scaler")

    def flush(self) -> None:
        """Do nothing: no `GradScaler` finds an overflow."""
