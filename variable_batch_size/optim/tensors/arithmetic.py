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
from variable_batch_size.backend.base import scalar_dtype

WITHOUT_FLOAT64 = ("mps", "tpu", "xla")  # device types that lack float64, or emulate it


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
    """Add `weight` times the tensors `new` to `sums`, both by parameter; `sums` changes.

    Where a parameter has no sum yet, the tensor itself becomes the sum, multiplied in place.
    """
    with_sum = [parameter for parameter in new if parameter in sums]
    if with_sum:
        terms = local_parts(map(sums.__getitem__, with_sum)), local_parts(map(new.__getitem__, with_sum))
        if with_sum[0].device.type == "xla":  # where sums that are new tensors take half the time to trace
            sums.update(zip(with_sum, torch._foreach_add(*terms, alpha=weight), strict=True))
        else:
            torch._foreach_add_(*terms, alpha=weight)
    without_sum = {parameter: tensor for parameter, tensor in new.items() if parameter not in sums}
    if without_sum and weight != 1:
        torch._foreach_mul_(local_parts(without_sum.values()), weight)
    sums.update(without_sum)


def multiply(gradients: Sequence[Tensor], factor: Any, backend: Backend) -> None:
    """Multiply gradients in place by a float or a 0-D tensor.

    A float of 1 does nothing, unless the device compiles graphs: there every update must run the same operations.
    """
    if not gradients or (isinstance(factor, float) and factor == 1 and not backend.static_graph):
        return
    parts = local_parts(gradients)
    torch._foreach_mul_(parts, factor if isinstance(factor, Tensor) else backend.scalar(factor, parts[0]))


def zero_unless(finite: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set tensors to 0, in place, if `finite`, 0-D, is false.

    A GPU starts one kernel for a product of all tensors of a list. Nan times 0 is nan, but the bits of nan, as an
    integer, times 0 are those of 0.
    """
    zeros: dict[torch.dtype, Tensor] = {}
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bits = _bits_of(tensor)
        if bits is None:
            if tensor.dtype not in zeros:
                zeros[tensor.dtype] = tensor.new_zeros(())
            tensor.copy_(torch.where(finite, tensor, zeros[tensor.dtype]))
        else:
            by_dtype.setdefault(bits.dtype, []).append(bits)
    for dtype, all_bits in by_dtype.items():
        torch._foreach_mul_(all_bits, finite.to(dtype))


def _bits_of(tensor: Tensor) -> Tensor | None:
    """Return a view of the numbers of a tensor as integers of the same size; None if there is none."""
    is_stored_otherwise = tensor.is_conj() or tensor.is_neg()  # until it is read
    if tensor.device.type in ("xla", "tpu") or is_stored_otherwise:  # graphs have no views of bits
        return None
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(real.itemsize)
    return None if dtype is None else real.view(dtype)


def check_dense(parameters: Sequence[Tensor]) -> None:
    """Raise TypeError if the gradient of a parameter is sparse, as of an embedding with sparse=True."""
    for number, parameter in enumerate(parameters):
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of parameter {number}, of shape {tuple(parameter.shape)}, must be dense, but has "
                f"layout {parameter.grad.layout}; build the layer with sparse=False"
            )


def has_dtensor(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of the tensors is a DTensor."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def sum_over_parts(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a DTensor with partial placements after adding its summands, which are on several ranks.

    The gradient of a replicated parameter may have such placements. The sum is placed as the parameter `like`, or else
    replicated. Any other tensor is returned as it is.
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
        summed = sum_over_parts(tensor)
        groups = list[ProcessGroup]()
        key: tuple[object, ...] = ()
        if isinstance(summed, DTensor):
            mesh = summed.device_mesh
            split_dims = [dim for dim, placement in enumerate(summed.placements) if not placement.is_replicate()]
            key = (mesh, *split_dims)
            groups = [mesh.get_group(dim) for dim in split_dims]
        by_groups.setdefault(key, ([], groups))[0].extend(local_parts([summed]))
    return [*by_groups.values()]


def shard_coordinates(tensor: DTensor) -> list[int]:
    """Return which part of a tensor this rank has: its coordinates in the dimensions of the mesh that split it."""
    coordinates = tensor.device_mesh.get_coordinate() or []  # one in each dimension of the mesh
    pairs = zip(coordinates, tensor.placements, strict=True)
    return [coordinate for coordinate, placement in pairs if not placement.is_replicate()]


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
    """Return the norm |t|, 0-D, by one operation unless torch would lose digits, as with a large tensor on the CPU."""
    if tensor.numel() > _LARGE and tensor.is_cpu:
        return squared_norm([tensor]).sqrt()
    return torch.linalg.vector_norm(tensor, dtype=_at_least_float32(tensor))  # type: ignore[no-any-return]


def sum_of_squares(norms: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of norms, each 0-D as `norm_of` returns it: 0-D, float64 on the CPU."""
    dtypes = dict.fromkeys(norm.dtype for norm in norms)
    if len(dtypes) > 1:
        norms = [norm.to(torch.float64) for norm in norms]
    joined: Tensor = torch.stack(list(norms))
    return (joined.double() if joined.device.type == "cpu" else joined).square().sum()


def _norm_over_ranks(parts: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Return sum |t|^2, 0-D, over the parts that this rank and the ranks of the process groups have."""
    square = squared_norm(parts)
    for group in groups:
        dist.all_reduce(square, group=group)
    return square


def _squared_norm_by_product(tensor: Tensor) -> Tensor:
    """Return sum |t|^2, 0-D, on XLA:CPU: a matrix product with ones sums three times as fast, and writes no squares.

    It is not used on a TPU, which would round the squares to bfloat16.
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
