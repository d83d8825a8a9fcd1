"""The output of an update, made of those of its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from variable_batch_size._validation import value_error
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

    Raises:
        ValueError: if the microbatches have unequal structures, or rows of unequal shapes.
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
            floating = like.is_floating_point() or like.is_complex()
            return torch.as_tensor(result).to(like.device, like.dtype if floating else torch.get_default_dtype())
        return float(result)

    return _walk(outputs, samples, mean)


def _walk(outputs: Sequence[Any], samples: Sequence[int], mean: Mean) -> Any:
    """Return the structure of the outputs, with what `mean` returns for numbers."""
    first = outputs[0]
    if len(forms := list(dict.fromkeys(map(_form, outputs)))) > 1:
        requirement = "the step must return the same names, numbers of values and shapes of rows for each microbatch"
        raise value_error(requirement, " and ".join(forms[:2]), "pad rows to one shape, or leave these values out")
    if isinstance(first, Mapping):
        return {name: _walk([output[name] for output in outputs], samples, mean) for name in first}
    if isinstance(first, (tuple, list)):
        parts = [_walk(values, samples, mean) for values in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, Tensor) and first.dim():
        own = [output for output, n in zip(outputs, samples, strict=True) if n]
        return torch.cat(own) if own else []  # a metric of Ignite leaves an empty list out, unlike an empty tensor
    return mean(outputs) if _is_number(first) else outputs[-1]


def _form(output: Any) -> str:
    """Return what the outputs of all microbatches must have in common."""
    if isinstance(output, Mapping):
        return f"a mapping with {', '.join(sorted(map(str, output)))}"
    if isinstance(output, (tuple, list)):
        return f"a sequence of {len(output)}"
    if isinstance(output, Tensor) and output.dim():
        return f"a tensor with rows of shape {tuple(output.shape[1:])}"
    return "a number" if _is_number(output) else "a value of another type"


def _is_number(output: Any) -> bool:
    return isinstance(output, (Tensor, Real)) and not isinstance(output, bool)
