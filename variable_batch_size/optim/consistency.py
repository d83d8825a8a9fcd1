"""What all ranks must have in common: found out before the first update, and made so."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from variable_batch_size.backend import Backend, detect

DIGITS, BASE = 4, 1 << 16  # a 64-bit number as float32 digits, which every backend adds up exactly


@torch.no_grad()
def broadcast_parameters(model: torch.nn.Module, backend: Backend | None = None) -> None:
    """Give every rank rank 0's parameters and buffers, in place.

    Raises:
        TypeError: for a model in DistributedDataParallel, which would reduce the gradients a second time.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if isinstance(model, DistributedDataParallel):
        raise TypeError(_TWICE)
    backend = backend or detect(tensors)
    if backend.world.size == 1 or not tensors:
        return
    mine = torch.tensor([backend.world.rank == 0]).to(tensors[0].device)
    wide = [_summable(tensor) for tensor in tensors]
    sums = [torch.where(mine.view((1,) * tensor.dim()), tensor, torch.zeros_like(tensor)) for tensor in wide]
    backend.all_reduce_sum(sums)
    for tensor, total in zip(tensors, sums, strict=True):
        tensor.copy_(total.to(tensor.dtype))
    backend.mark_step()


def compare(facts: Mapping[str, int], backend: Backend, device: torch.device) -> None:
    """Compare numbers (each 0 <= number < 2**64) that have to be the same on every rank.

    Raises:
        RuntimeError: on every rank, naming what differs, both values and a rank that has each.
    """
    digits = [fact // BASE**place % BASE for fact in facts.values() for place in range(DIGITS)]
    rows = gather(digits, backend, device).long().view(backend.world.size, len(facts), DIGITS)
    for rank in range(1, backend.world.size):
        for name, first, other in zip(facts, rows[0].tolist(), rows[rank].tolist(), strict=True):
            if first != other:
                raise RuntimeError(
                    f"all ranks must train with the same {name}, but it is {_number(first)} on rank 0 and "
                    f"{_number(other)} on rank {rank}; {_REMEDIES.get(name, 'pass the same value on every rank')}"
                )


def union(mask: Sequence[bool], backend: Backend, device: torch.device) -> list[bool]:
    """What is true on any rank."""
    return gather([int(entry) for entry in mask], backend, device).any(dim=0).tolist()


def gather(row: Sequence[float], backend: Backend, device: torch.device) -> Tensor:
    """Each rank's row of as many float32 numbers, (world size, len(row)) on the host, by a sum of one-hot rows."""
    rows = torch.zeros(backend.world.size, len(row), dtype=torch.float32)
    rows[backend.world.rank] = torch.tensor(row, dtype=torch.float32)
    rows = rows.to(device)
    backend.all_reduce_sum([rows])
    return backend.host(rows)


def checksum(parameters: Iterable[Tensor], backend: Backend) -> int:
    """CRC-32 of the parameters' bytes."""
    crc = 0
    for parameter in parameters:
        host = backend.host(parameter).contiguous()
        crc = zlib.crc32(host.view(-1).view(torch.uint8).numpy().data, crc)
    return crc


def refuse_distributed_data_parallel(parameters: Iterable[Tensor]) -> None:
    """Refuse parameters whose gradients DistributedDataParallel reduces already.

    Raises:
        RuntimeError: when such a module holds one of them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return  # there can be no such module
    own = {id(parameter) for parameter in parameters}
    # Objects refer to their class. gc.get_objects() would hold tensors too, and break those that a thread frees.
    for module in gc.get_referrers(DistributedDataParallel):
        if isinstance(module, DistributedDataParallel) and not own.isdisjoint(map(id, module.parameters())):
            raise RuntimeError(_TWICE)


_TWICE = (
    "the model's gradients must be this rank's own until optimizer.step() reduces them, but the model is wrapped in "
    "DistributedDataParallel, which reduces them as well; train the bare module"
)
_REMEDIES = {
    "parameters": "call vbs.broadcast_parameters(model) before the first update",
    "epoch": "call set_epoch with the same epoch on every rank, and restore the same checkpoint",
    "step": "restore the same checkpoint on every rank",
}


def _number(digits: Sequence[int]) -> int:
    return sum(digit * BASE**place for place, digit in enumerate(digits))


def _summable(tensor: Tensor) -> Tensor:
    """The same values in a type that every backend can add up: no 16-bit integers, for example."""
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
