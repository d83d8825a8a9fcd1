"""Flat messages: many tensors as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def split_flat(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of a flat tensor that have the shapes of `parts`."""
    views = torch.split(flat, [part.numel() for part in parts])
    return [view.view(part.shape) for view, part in zip(views, parts, strict=True)]
