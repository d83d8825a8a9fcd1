"""The squared norm of gradients of any dtype, exact enough for differences of such norms, also of sharded ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from variable_batch_size.backend import xla
from variable_batch_size.optim.accumulation import is_narrow, scalar_dtype
from variable_batch_size.optim.dtensors import are_parts, groups_of_parts

_LARGE, _ROW = 1 << 14, 1 << 10  # elements; a float32 sum of many more than a row loses digits on the CPU


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return sum |t|^2 over the tensors, 0-D on the first tensor's device: float64 on the CPU, else `scalar_dtype`.

    On the CPU, large tensors are summed by rows, and the sums of the rows in float64: `torch.linalg.vector_norm` of 4
    million float32 numbers is 1e-4 too small there. On XLA:CPU they are multiplied by ones.

    Ranks that hold parts of the same tensors have to call it together.
    """
    if are_parts(tensors):
        return torch.stack([_over_ranks(parts, groups) for parts, groups in groups_of_parts(tensors)]).sum()
    device = tensors[0].device
    if xla.is_cpu(device):
        return torch.stack([_by_product(tensor) for tensor in tensors]).to(scalar_dtype(tensors)).sum()
    on_cpu = device.type == "cpu"
    small = [tensor for tensor in tensors if not (on_cpu and tensor.numel() > _LARGE)]
    norms = []  # () each, or (rows,) of a large tensor
    for tensor in tensors if on_cpu else ():
        if tensor.numel() > _LARGE:
            flat = tensor.reshape(-1)
            end = flat.numel() // _ROW * _ROW
            rows = flat[:end].view(-1, _ROW)  # (rows, _ROW)
            norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=_at_least_float32(tensor)))
            small.append(flat[end:])
    for dtype in dict.fromkeys(map(_at_least_float32, small)):  # a dict keeps the same order in every process
        norms += torch._foreach_norm([tensor for tensor in small if _at_least_float32(tensor) == dtype], 2, dtype)
    sum_dtype = torch.float64 if on_cpu else scalar_dtype(tensors)
    norms = [norm.to(device, sum_dtype) for norm in norms]
    joined = torch.cat([norm.view(-1) for norm in norms]) if on_cpu else torch.stack(norms)  # (norms,)
    return joined.square().sum()


def _over_ranks(parts: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> Tensor:
    square = squared_norm(parts)
    for group in groups:
        dist.all_reduce(square, group=group)
    return square


def _by_product(tensor: Tensor) -> Tensor:
    """Return sum |t|^2, 0-D. XLA:CPU sums a matrix product three times as fast, which does not write the squares.

    A TPU would round the squares to bfloat16.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    squares = tensor.to(_at_least_float32(tensor) or tensor.dtype).square()
    if tensor.numel() <= _LARGE or tensor.numel() % _ROW:
        return squares.sum()
    return (squares.view(-1, _ROW) @ squares.new_ones(_ROW, 1)).sum()


def _at_least_float32(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype in which to compute a norm; None is that of the tensor."""
    return torch.float32 if is_narrow(tensor) else None
