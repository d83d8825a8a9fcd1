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

        def key(tensor: Tensor) -> str:
            return f"{tensor.device} {tensor.dtype}"

        for _, same_key in groupby(sorted(tensors, key=key), key=key):
            parts = list(same_key)
            flat = self._buffer_of_length(parts[0], sum(part.numel() for part in parts))  # (elements of all,)
            torch.cat([part.detach().reshape(-1) for part in parts], out=flat)
            reduce(flat)
            views = torch.split(flat, [part.numel() for part in parts])
            torch._foreach_copy_(parts, [view.view(part.shape) for view, part in zip(views, parts, strict=True)])

    def _buffer_of_length(self, like: Tensor, length: int) -> Tensor:
        """Return the buffer of this length, and drop those of other lengths with the device and dtype of `like`."""
        key = (like.device, like.dtype, length)
        if key not in self._buffers:
            self._buffers = {other: buffer for other, buffer in self._buffers.items() if other[:2] != key[:2]}
            self._buffers[key] = torch.empty(length, dtype=like.dtype, device=like.device)
        return self._buffers[key]
