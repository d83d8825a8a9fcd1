"""The output of an update, made of those of its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from variable_batch_size.backend import Backend

Mean = Callable[[Sequence[Any]], Any]


def combine(outputs: Sequence[Any], samples: Sequence[int], batch_size: int, backend: Backend) -> Any:
    """Return the output of an update; all ranks have to call it.

    Args:
        outputs: those of this rank's microbatches, of the same structure: mappings, tuples and lists of values.
        samples: those of each microbatch, 0 for one that is repeated.
        batch_size: samples of the update, over all ranks.
        backend: how ranks communicate.

    Returns:
        The structure, with the mean over all ranks, sum_j n_j v_j / B, in the place of numbers and 0-D tensors; the
        rows of this rank in the place of other tensors, or an empty list if it has none; and otherwise the last value.
    """
    sums: list[Any] = []

    def add(values: Sequence[Any]) -> None:
        sums.append(sum(n * value for n, value in zip(samples, values, strict=True) if n))

    _walk(outputs, samples, add)
    if backend.world.size > 1 and sums:
        rows = [torch.as_tensor(value, dtype=torch.float64).to(backend.device) for value in sums]
        backend.all_reduce_sum([total := torch.stack(rows)])
        sums = list(total.unbind())
    remaining = iter(sums)

    def mean(values: Sequence[Any]) -> Any:
        result = next(remaining) / batch_size
        like = values[0]
        if isinstance(like, Tensor):
            return torch.as_tensor(result).to(like.device, like.dtype)
        return float(result)

    return _walk(outputs, samples, mean)


def _walk(outputs: Sequence[Any], samples: Sequence[int], mean: Mean) -> Any:
    """Return the structure of the outputs, with what `mean` returns for numbers."""
    first = outputs[0]
    if isinstance(first, Mapping):
        return {name: _walk([output[name] for output in outputs], samples, mean) for name in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_walk(parts, samples, mean) for parts in zip(*outputs, strict=True))
    if isinstance(first, Tensor) and first.dim():
        own = [output for output, n in zip(outputs, samples, strict=True) if n]
        return torch.cat(own) if own else []  # a metric of Ignite leaves an empty list out, unlike an empty tensor
    return outputs[-1] if isinstance(first, bool) or not isinstance(first, (Tensor, Real)) else mean(outputs)
