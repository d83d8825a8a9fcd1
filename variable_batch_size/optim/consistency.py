"""What all ranks must have in common: check it before the first update, and broadcast the parameters."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from variable_batch_size.backend import Backend, detect

_DIGITS, _BASE = 4, 1 << 16  # a 64-bit integer as digits that float32 represents and every backend sums exactly

_WRAPPED = (
    "gradients must be reduced once, by optimizer.step(), but the model is wrapped in DistributedDataParallel, which "
    "reduces them too; train the bare module (model.module)"
)
_REMEDIES = {
    "parameters": "call vbs.broadcast_parameters(model) before the first update",
    "epoch": "call set_epoch with the same epoch on every rank, and restore the same checkpoint",
    "step": "restore the same checkpoint on every rank",
}


@torch.no_grad()
def broadcast_parameters(model: torch.nn.Module, backend: Backend | None = None) -> None:
    """Copy the parameters and buffers of rank 0 to every rank, in place. Every rank has to call it.

    Args:
        model: module with the same parameters and buffers, up to their values, on every rank.
        backend: how ranks communicate. Default: what fits the device of the parameters, see `vbs.detect`.

    Raises:
        TypeError: if `model` is wrapped in DistributedDataParallel, which would reduce the gradients a second time.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if isinstance(model, DistributedDataParallel):
        raise TypeError(_WRAPPED)
    backend = backend or detect(tensors)
    if backend.world.size == 1 or not tensors:
        return
    is_source = torch.tensor([backend.world.rank == 0]).to(tensors[0].device)  # (1,): as data, in one graph for all
    values = [_summable(tensor) for tensor in tensors]
    sums = [torch.where(is_source.view((1,) * value.dim()), value, torch.zeros_like(value)) for value in values]
    backend.all_reduce_sum(sums)
    for tensor, total in zip(tensors, sums, strict=True):
        tensor.copy_(total.to(tensor.dtype))
    backend.mark_step()


def check_same_on_all_ranks(facts: Mapping[str, int], backend: Backend, device: torch.device) -> None:
    """Check that these integers are the same on every rank. Every rank has to call it.

    Args:
        facts: name -> integer in [0, 2**64), with the same names in the same order on every rank.
        backend: how ranks communicate.
        device: device on which they communicate.

    Raises:
        RuntimeError: if one differs; on every rank, with its name, two values, and a rank that has each.
    """
    digits = [fact // _BASE**place % _BASE for fact in facts.values() for place in range(_DIGITS)]
    rows = backend.all_gather_floats(digits, device).long().view(backend.world.size, len(facts), _DIGITS)
    for rank in range(1, backend.world.size):
        for name, first, other in zip(facts, rows[0].tolist(), rows[rank].tolist(), strict=True):
            if first != other:
                raise RuntimeError(
                    f"all ranks must train with the same {name}, but it is {_from_digits(first)} on rank 0 and "
                    f"{_from_digits(other)} on rank {rank}; {_REMEDIES.get(name, 'pass the same value on every rank')}"
                )


def checksum(parameters: Iterable[Tensor], backend: Backend) -> int:
    """Return the CRC-32 of the bytes of the parameters, in row-major order."""
    crc = 0
    for parameter in parameters:
        host = backend.host(parameter).contiguous()
        crc = zlib.crc32(host.view(-1).view(torch.uint8).numpy().data, crc)
    return crc


def check_not_distributed_data_parallel(parameters: Iterable[Tensor]) -> None:
    """Check that DistributedDataParallel does not reduce the gradients of these parameters.

    Raises:
        RuntimeError: if a DistributedDataParallel module has one of them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return  # DistributedDataParallel cannot be constructed without a process group
    ids = {id(parameter) for parameter in parameters}
    # Every object refers to its class. gc.get_objects() would also hold references to tensors, while other threads may
    # be freeing them.
    for module in gc.get_referrers(DistributedDataParallel):
        if isinstance(module, DistributedDataParallel) and not ids.isdisjoint(map(id, module.parameters())):
            raise RuntimeError(_WRAPPED)


def _from_digits(digits: Sequence[int]) -> int:
    return sum(digit * _BASE**place for place, digit in enumerate(digits))


def _summable(tensor: Tensor) -> Tensor:
    """Return the same values in a dtype that every backend can sum: 16-bit integers, for example, become int64."""
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
