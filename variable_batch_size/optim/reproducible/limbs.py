"""Sums of floats that do not depend on their order: each number becomes two integers.

A number x is x = (hi 2^54 + lo) 2^-74 with integers hi and lo, rounded to a multiple of 2^-74; |lo| <= 2^53. Integers
are added exactly, in any order. `carry` makes the pair of a sum unique.
"""

from __future__ import annotations

import torch
from torch import Tensor

HIGH, LOW = 2.0**20, 2.0**74
LARGEST = 2.0**42  # the sum of the absolute values of all numbers must be smaller
CARRIED = 512  # numbers after which `carry` has to follow, so that lo does not wrap
CHUNK = 2**15  # elements that are computed together: their intermediate results stay in the cache of a core


def add(total: Tensor, numbers: Tensor, weight: float | Tensor = 1.0, *, first: bool = False) -> Tensor:
    """Add `weight` times numbers to sums, in place, and return the largest absolute value, 0-D, nan if one is nan.

    Args:
        total: the sums, (2, n), int64: hi and lo.
        numbers: (n,), of any floating dtype.
        weight: a float, or 0-D.
        first: whether the sums are still 0, whatever is in `total`.
    """
    if numbers.device.type != "cpu" or len(numbers) <= CHUNK:
        return _add(total, numbers, weight, first)
    pieces = zip(torch.split(total, CHUNK, 1), torch.split(numbers, CHUNK), strict=True)
    return torch.stack([_add(*piece, weight, first) for piece in pieces]).max()


def _add(total: Tensor, numbers: Tensor, weight: float | Tensor, first: bool) -> Tensor:
    """Add numbers to sums as `add` does, all at once: hi is x rounded to 2^-20, and lo the rest in units of 2^-74."""
    weighted = numbers.to(torch.float64)
    if isinstance(weight, Tensor) or weight != 1:
        weighted = weighted * weight
    high = (weighted * HIGH).round_()
    low = torch.sub(weighted, high, alpha=1 / HIGH).mul_(LOW).round_()  # exact until it is rounded
    if first:
        total[0].copy_(high)
        total[1].copy_(low)
    else:
        total[0] += high.long()
        total[1] += low.long()
    return weighted.abs_().max()


def carry(total: Tensor) -> None:
    """Move multiples of 2^54 from lo to hi, in place, so that -2^53 <= lo < 2^53: the pair of each sum is then unique.

    `total`: sums, (2, n), int64: hi and lo, where a number is (hi 2^54 + lo) 2^-74.
    """
    for high, low in torch.split(total, CHUNK, 1) if total.device.type == "cpu" else [total]:
        carried = (low + 2**53) >> 54  # low / 2^54, rounded to the nearest integer
        low -= carried << 54
        high += carried


def value(total: Tensor, factor: float | Tensor, out: Tensor) -> Tensor:
    """Write `factor` times sums, as floats, to `out`, (n,), and return it. `carry` must have been called for the sums.

    The result depends on nothing but the integers and the factor; it is rounded at most three times before it gets the
    dtype of `out`. `total`: (2, n), int64: hi and lo.
    """
    chunk = CHUNK if out.device.type == "cpu" else max(1, len(out))
    for (high, low), result in zip(torch.split(total, chunk, 1), torch.split(out, chunk), strict=True):
        as_float = torch.add(high.to(torch.float64) / HIGH, low.to(torch.float64), alpha=1 / LOW)
        result.copy_(as_float * factor)
    return out
