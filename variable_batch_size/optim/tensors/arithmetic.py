"""Gradients as tensors: squared norms, factors, and DTensors, whose parts lie on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from variable_batch_size.backend import Backend, xla


@torch.no_grad()
def scalar_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of 0-D factors and sums for these tensors: float64 if any has 64-bit numbers, else float32."""
    return torch.float64 if any(torch.finfo(tensor.dtype).bits == 64 for tensor in tensors) else torch.float32


def is_narrow(tensor: Tensor) -> bool:
    """Return whether numbers have fewer than 32 bits: their sums overflow (float16) or lose digits (bfloat16)."""
    return tensor.dtype.itemsize < 4


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the part of each tensor that this rank has, in the same memory; of an ordinary tensor itself."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def widen(gradient: Tensor) -> Tensor:
    """Return a gradient in at least float32."""
    return gradient.float() if is_narrow(gradient) else gradient


def collect_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of those parameters that have one."""
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def add_to(sums: dict[Tensor, Tensor], new: Mapping[Tensor, Tensor], weight: float = 1.0) -> None:
    """Add `weight` times gradients to sums, both by parameter. A parameter without a sum gets its tensor as one."""
    known = [parameter for parameter in new if parameter in sums]
    if known:
        terms = local_parts(map(sums.__getitem__, known)), local_parts(map(new.__getitem__, known))
        if known[0].device.type == "xla":  # which takes half the time to trace sums that are new tensors
            sums.update(zip(known, torch._foreach_add(*terms, alpha=weight), strict=True))
        else:
            torch._foreach_add_(*terms, alpha=weight)
    others = {parameter: gradient for parameter, gradient in new.items() if parameter not in sums}
    if others and weight != 1:
        torch._foreach_mul_(local_parts(others.values()), weight)
    sums.update(others)


def multiply(gradients: Sequence[Tensor], factor: Any, backend: Backend) -> None:
    """Multiply gradients in place by a float or a 0-D tensor. A factor of 1 is left out unless a graph is static."""
    if not gradients or (isinstance(factor, float) and factor == 1 and not backend.static_graph):
        return
    parts = local_parts(gradients)
    torch._foreach_mul_(parts, factor if isinstance(factor, Tensor) else backend.scalar(factor, parts[0]))


def check_dense(parameters: Sequence[Tensor]) -> None:
    """Raise TypeError if a gradient is sparse."""
    for number, parameter in enumerate(parameters):
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise TypeError(
                f"gradients must be dense, but that of parameter {number}, of shape {tuple(parameter.shape)}, has "
                f"layout {parameter.grad.layout}; build the layer with sparse=False"
            )


def has_dtensor(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of the tensors is a DTensor."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def sum_over_parts(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor after adding its parts over ranks, if it is a DTensor with partial placements, else itself.

    The gradient of a replicated parameter may be one. The sum is placed as the parameter `like`, or else replicated.
    """
    if not isinstance(tensor, DTensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=like.placements if isinstance(like, DTensor) else placements)


def groups_of_parts(tensors: Iterable[Tensor]) -> list[tuple[list[Tensor], list[ProcessGroup]]]:
    """Return pairs of this rank's parts of tensors, and the process groups of the ranks that have the other parts.

    Tensors that are split over the same groups are in one pair. A tensor that is the same on several ranks is counted
    once by a sum over these groups.
    """
    by_groups: dict[tuple[object, ...], tuple[list[Tensor], list[ProcessGroup]]] = {}
    for tensor in tensors:
        whole = sum_over_parts(tensor)
        groups = list[ProcessGroup]()
        key: tuple[object, ...] = ()
        if isinstance(whole, DTensor):
            mesh = whole.device_mesh
            split = [dim for dim, placement in enumerate(whole.placements) if not placement.is_replicate()]
            key = (mesh, *split)
            groups = [mesh.get_group(dim) for dim in split]
        by_groups.setdefault(key, ([], groups))[0].extend(local_parts([whole]))
    return [*by_groups.values()]


def shard_coordinates(tensor: DTensor) -> list[int]:
    """Return which part of a tensor this rank has: its coordinates in the dimensions of the mesh that split it."""
    coordinate = tensor.device_mesh.get_coordinate() or []
    pairs = zip(coordinate, tensor.placements, strict=True)
    return [index for index, placement in pairs if not placement.is_replicate()]


def check_whole(tensors: Sequence[Tensor], call: str, remedy: str) -> None:
    """Raise TypeError if a tensor is sharded; `call` is what needs it whole, in words for the error."""
    if has_dtensor(tensors):
        raise TypeError(f"{call} needs whole tensors, but the model is sharded (its parameters are DTensors); {remedy}")


_LARGE, _ROW = 1 << 14, 1 << 10  # elements; a float32 sum of many more than a row loses digits on the CPU


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return sum |t|^2 over the tensors, 0-D on the first tensor's device: float64 on the CPU, else `scalar_dtype`.

    On the CPU, large tensors are summed by rows, and the sums of the rows in float64: `torch.linalg.vector_norm` of 4
    million float32 numbers is 1e-4 too small there. On XLA:CPU they are multiplied by ones.

    Ranks that hold parts of the same tensors have to call it together.
    """
    if has_dtensor(tensors):
        return torch.stack([_norm_over_ranks(parts, groups) for parts, groups in groups_of_parts(tensors)]).sum()
    device = tensors[0].device
    if xla.is_cpu(device):
        return torch.stack([_squared_norm_by_product(tensor) for tensor in tensors]).to(scalar_dtype(tensors)).sum()
    on_cpu = device.type == "cpu"
    large = [tensor.reshape(-1) for tensor in tensors if on_cpu and tensor.numel() > _LARGE]
    ends = [flat.numel() // _ROW * _ROW for flat in large]
    small = [tensor for tensor in tensors if not (on_cpu and tensor.numel() > _LARGE)]
    small += [flat[end:] for flat, end in zip(large, ends, strict=True) if end < flat.numel()]
    norms = [
        torch.linalg.vector_norm(flat[:end].view(-1, _ROW), dim=1, dtype=_at_least_float32(flat))  # (rows,)
        for flat, end in zip(large, ends, strict=True)
    ]
    for dtype in dict.fromkeys(map(_at_least_float32, small)):  # a dict keeps the same order in every process
        alike = [tensor for tensor in small if _at_least_float32(tensor) == dtype]
        norms.append(torch.stack(torch._foreach_norm(alike, 2, dtype)))  # (tensors,)
    sum_dtype = torch.float64 if on_cpu else scalar_dtype(tensors)
    norms = [norm.to(device, sum_dtype) for norm in norms]
    joined = torch.cat(norms) if len(norms) > 1 else norms[0]
    return torch.dot(joined, joined) if on_cpu else joined.square().sum()


def norm_of(tensor: Tensor) -> Tensor:
    """Return |t|, 0-D, as `squared_norm` measures it; one operation for a small tensor."""
    if tensor.numel() > _LARGE and tensor.is_cpu:
        return squared_norm([tensor]).sqrt()
    return torch.linalg.vector_norm(tensor, dtype=_at_least_float32(tensor))  # type: ignore[no-any-return]


def sum_of_squares(norms: Sequence[Tensor]) -> Tensor:
    """Return sum |t|^2 of what `norm_of` returned, 0-D each: float64 on the CPU."""
    dtypes = dict.fromkeys(norm.dtype for norm in norms)
    if len(dtypes) > 1:
        norms = [norm.to(torch.float64) for norm in norms]
    joined: Tensor = torch.stack(list(norms))
    return (joined.double() if joined.device.type == "cpu" else joined).square().sum()


def _norm_over_ranks(parts: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Return sum |t|^2, 0-D, over the parts that this rank and those of the groups have."""
    square = squared_norm(parts)
    for group in groups:
        dist.all_reduce(square, group=group)
    return square


def _squared_norm_by_product(tensor: Tensor) -> Tensor:
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
