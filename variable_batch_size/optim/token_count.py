"""What the losses of a step sum over, for example tokens, if that is not its samples."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from variable_batch_size._validation import check_number, value_error
from variable_batch_size.backend import Backend
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.accumulation import multiply


@final
class TokenCount:
    """Sums the counts of `step(count=)`, by which the gradient of an update is divided.

    G = (sum_j d_j S_j) / (sum_j d_j c_j) over the microbatches j of all ranks: S_j is the gradient of the sum of the
    losses of a microbatch, c_j its count, and d_j its distinct samples divided by its rows, so that repeated rows count
    once and replays not at all. In a mean of the means S_j / c_j a token would weigh less in a longer microbatch.

    Args:
        backend: backend of the optimizer.

    Attributes:
        used: whether the steps of this training have counts; None before the first one.
        weight: d_j c_j of the last microbatch.
        last: sum of the d_j c_j of all ranks in the last update, 0-D; None without counts.
    """

    def __init__(self, backend: Backend) -> None:
        self.used: bool | None = None
        self.weight: Any = 0.0
        self.last: Tensor | None = None
        self._backend = backend
        self._sum: Any = None  # of the weights of this rank's microbatches: a float, or 0-D on a device
        self._zero: Any = None  # with which it begins; kept, so that no graph changes

    def check(self, count: object, reduction: str, *, noise: bool) -> None:
        """Check the argument of a step.

        Raises:
            TypeError: if the count is neither a number nor a tensor with one element.
            ValueError: if it is negative, or `reduction` is not "sum", or the noise is measured.
            RuntimeError: if some steps have a count and others have none.
        """
        if self.used is not None and self.used != (count is not None):
            raise RuntimeError(
                f"either every step() has a count, or none, but this one has {'one' if count is not None else 'none'}; "
                f"pass count= for every microbatch on every rank, replays too"
            )
        if count is None:
            return
        if reduction != "sum":
            requirement = "step(count=) needs a loss that is summed over the rows of a microbatch"
            raise value_error(
                requirement, f"reduction={reduction!r}", 'pass reduction="sum" to the loss and to the optimizer'
            )
        if noise:
            raise ValueError(
                "step(count=) needs a rule without gradient noise, because the estimate compares microbatches by their "
                "samples, but the noise is measured; choose another rule or controller, or omit noise="
            )
        if not isinstance(count, Tensor):
            check_number(count, "count", "pass the number of tokens of the microbatch")
        elif count.numel() != 1 or count.is_complex():
            raise TypeError(
                f"count must be a number or a tensor with one element, got a tensor of shape {tuple(count.shape)}; "
                f"pass its .sum()"
            )

    def add(self, count: Any, microbatch: Microbatch, like: Tensor) -> None:
        """Add the count of a microbatch; None if the steps have none."""
        self.used = count is not None
        if count is None:
            return
        if isinstance(count, Tensor):
            count = count.detach().reshape(())
            if like.device.type == "cpu":
                count = check_number(count.item(), "count", "pass the number of tokens of the microbatch")
            else:
                count = count.to(like.device, torch.float32)
        else:
            count = self._backend.scalar(float(count), like)
        distinct = microbatch.samples / microbatch.rows
        self.weight = count * (self._backend.scalar(distinct, like) if isinstance(count, Tensor) else distinct)
        self._zero = self._backend.scalar(0.0, like) if self._zero is None else self._zero
        self._sum = (self._zero if self._sum is None else self._sum) + self.weight

    def message(self, like: Tensor) -> list[Tensor]:
        """Return what the ranks have to sum: the counts of this rank, (1,); nothing if there are none."""
        if not self.used:
            return []
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return [torch.as_tensor(self._sum, dtype=dtype).to(like.device).view(1)]

    @staticmethod
    def total(message: list[Tensor]) -> Tensor | None:
        """Return the counts of all ranks, 0-D, from the summed message; None if there are none."""
        return message[0][0] if message else None

    def settle(self, message: list[Tensor], gradients: list[Tensor], batch_size: int) -> bool:
        """Turn gradients that were divided by the samples into those that are divided by the counts.

        On a device the gradients become 0 if nothing was counted, because the host does not know it.

        Returns:
            False if nothing was counted on any rank, so that there is no gradient.
        """
        self.last = self.total(message)
        for total in message:
            if total.device.type == "cpu":
                counted = total.item()
                multiply(gradients, batch_size / counted if counted else 0.0, self._backend)
                return counted != 0
            size = torch.as_tensor(self._backend.scalar(batch_size, total))
            multiply(gradients, torch.where(total[0] > 0, size / total[0], 0.0), self._backend)
        return True

    def clear(self) -> None:
        """Discard the counts of the step."""
        self._sum = None
