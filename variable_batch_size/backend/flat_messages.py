"""Tensors as one flat message for each dtype and device, which a collective sums in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import final

import torch
from torch import Tensor


@final
class FlatMessages:
    """Flat messages, which are reused: allocation takes as long as the sum."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def reduce_flat(self, tensors: Sequence[Tensor], reduce: Callable[[Tensor], object]) -> None:
        """Join the tensors of each dtype and device to one, call `reduce` on it, and copy the result into the tensors.

        Args:
            tensors: changed in place.
            reduce: changes a flat tensor in place, as an all-reduce does.
        """

        def kind(tensor: Tensor) -> str:
            return f"{tensor.device} {tensor.dtype}"

        for _, same_kind in groupby(sorted(tensors, key=kind), key=kind):
            members = list(same_kind)
            flat = self._buffer_of_length(members[0], sum(tensor.numel() for tensor in members))  # (elements of all,)
            torch.cat([tensor.detach().reshape(-1) for tensor in members], out=flat)
            reduce(flat)
            sums = torch.split(flat, [tensor.numel() for tensor in members])
            sums_in_shape = [total.view(tensor.shape) for total, tensor in zip(sums, members, strict=True)]
            torch._foreach_copy_(members, sums_in_shape)

    def _buffer_of_length(self, like: Tensor, length: int) -> Tensor:
        """Return a tensor of this length to which tensors are joined; the last one of this length is used again.

        Buffers of other lengths with the same device and dtype are dropped, so that they take no memory.

        Args:
            like: tensor whose device and dtype it gets.
            length: number of elements.
        """
        key = (like.device, like.dtype, length)
        if key not in self._buffers:
            self._buffers = {other: buffer for other, buffer in self._buffers.items() if other[:2] != key[:2]}
            self._buffers[key] = torch.empty(length, dtype=like.dtype, device=like.device)
        return self._buffers[key]
