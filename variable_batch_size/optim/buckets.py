"""Buckets: parameters whose gradients are summed over the ranks in one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from variable_batch_size.backend.flat import split_flat
from variable_batch_size.optim.first_gradients import checksum

SUMMED = 16  # updates in which changes of any element are seen
FIRST_BYTES = 1 << 20  # of the first bucket of a dtype, which is to leave early; as in DistributedDataParallel


@final
class Bucket:
    """Parameters of one dtype and device, and the flat message for their gradients.

    Args:
        number: position in the order in which buckets are summed.
        indices: indices of the parameters, in the order in which their gradients come.
        parameters: all parameters of the optimizer.

    Attributes:
        flat: the message, (sum of numels,), reused in every update.
        views: the gradient of each parameter in it.
        missing: number of gradients that have not come.
        sent: the gradients and their versions when the message was filled.
    """

    def __init__(self, number: int, indices: Sequence[int], parameters: Sequence[Tensor]) -> None:
        self.number, self.indices = number, tuple(indices)
        self.parameters = [parameters[index] for index in indices]
        first = self.parameters[0]
        length = sum(parameter.numel() for parameter in self.parameters)
        self.flat = torch.empty(length, dtype=first.dtype, device=first.device)
        self.views = split_flat(self.flat, self.parameters)
        self.missing = len(self.indices)
        self.sent: list[tuple[Tensor | None, int]] = []
        some = sorted({0, len(self.parameters) // 2, len(self.parameters) - 1})
        self._sampled = [self.parameters[position] for position in some]
        self._times = 0  # that it was sent early
        self._seen = torch.empty(0)

    def note_sent(self) -> None:
        """Record the gradients as they are now."""
        self.sent = [_version(parameter.grad) for parameter in self.parameters]
        self._times += 1
        self._seen = self._look()

    def is_same(self) -> bool:
        """Return whether the gradients are those that were recorded, by their versions."""
        pairs = zip(self.parameters, self.sent, strict=True)
        return all(parameter.grad is sent and _version(sent)[1] == version for parameter, (sent, version) in pairs)

    def changed(self) -> Tensor:
        """Return whether some elements have changed, 0-D; `.data` changes without a version. `is_same` is true."""
        return (self._look() != self._seen).any()

    def reset(self) -> None:
        """Expect all gradients again."""
        self.missing, self.sent = len(self.indices), []

    def give_back(self, *, as_views: bool) -> None:
        """Set `.grad` of the parameters to what the message holds: to views of it, or to copies."""
        if as_views and all(parameter.is_contiguous() for parameter in self.parameters):
            for parameter, view in zip(self.parameters, self.views, strict=True):
                parameter.grad = view
            return
        for parameter in self.parameters:
            if parameter.grad is None or parameter.grad.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        torch._foreach_copy_([p.grad for p in self.parameters], self.views)  # type: ignore[misc]

    def _look(self) -> Tensor:
        """Return the bytes of the sums of all gradients in the first updates, and later of some of their elements."""
        if self._times <= SUMMED:
            sums = [checksum(parameter.grad).to(self.flat.device) for parameter in self.parameters]
            return torch.stack(sums).view(torch.uint8)
        gradients = [parameter.grad.detach() for parameter in self._sampled if parameter.grad is not None]
        parts = [
            gradient[tuple(slice(None, None, max(1, size // 4)) for size in gradient.shape)] for gradient in gradients
        ]
        bytes_ = [part.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for part in parts]
        return torch.cat(bytes_) if bytes_ else torch.empty(0, dtype=torch.uint8, device=self.flat.device)


def make_buckets(order: Sequence[int], parameters: Sequence[Tensor], bytes_per_bucket: float) -> list[Bucket]:
    """Return the buckets of parameters, by dtype and device.

    A bucket is closed by the parameter with which it reaches its size. Buckets are summed in the order in which their
    last gradients come, so that none waits for one that is complete later.

    Args:
        order: indices of the parameters, in the order in which their gradients come.
        parameters: all parameters of the optimizer.
        bytes_per_bucket: size at which a bucket is closed; the first one of a dtype also at `FIRST_BYTES`.
    """
    closed: list[list[int]] = []
    begun: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    room: dict[tuple[torch.dtype, torch.device], float] = {}  # bytes until a bucket is closed
    for index in order:
        key = parameters[index].dtype, parameters[index].device
        begun.setdefault(key, []).append(index)
        room[key] = room.get(key, min(FIRST_BYTES, bytes_per_bucket)) - parameters[index].nbytes
        if room[key] <= 0:
            closed.append(begun.pop(key))
            room[key] = bytes_per_bucket
    rest = sorted(begun.values(), key=lambda members: order.index(members[-1]))
    return [Bucket(number, indices, parameters) for number, indices in enumerate([*closed, *rest])]


def _version(gradient: Tensor | None) -> tuple[Tensor | None, int]:
    return gradient, -1 if gradient is None else gradient._version
