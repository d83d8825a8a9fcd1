"""What all ranks must have in common: check it before the first update, and broadcast the parameters."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from variable_batch_size._validation import without_addresses
from variable_batch_size.backend import Backend, detect
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.data_parallel import REDUCED_TWICE
from variable_batch_size.optim.loop import Loop
from variable_batch_size.optim.normalization import check_seen, remember
from variable_batch_size.optim.update import Updater

_DIGITS, _BASE = 4, 1 << 16  # a 64-bit integer as digits that float32 represents and every backend sums exactly

CONTROLLER = "controller with its arguments, by a checksum"

_REMEDIES = {
    "trace": "pass the same value on every rank; a controller must answer the same input in the same way on all",
    "parameters": "call vbs.broadcast_parameters(model) before the first update",
    "epoch": "call set_epoch with the same epoch on every rank, and restore the same checkpoint",
    "step": "restore the same checkpoint on every rank",
    "order of gradients": "restore the same checkpoint on every rank",
    "minimum number of microbatches": "train the same model on every rank, and create the same optimizers",
}


@torch.no_grad()
def broadcast_parameters(model: torch.nn.Module, backend: Backend | None = None) -> None:
    """Copy the parameters and buffers of rank 0 to every rank, in place. Every rank has to call it.

    Args:
        model: module with the same parameters and buffers, up to their values, on every rank.
        backend: how ranks communicate. Default: what fits the device of the parameters, see `vbs.detect`.

    Raises:
        TypeError: if `model` is wrapped in DistributedDataParallel, which would reduce the gradients a second time,
            unless its own reduction is off (`require_backward_grad_sync=False`).
    """
    tensors = [*model.parameters(), *model.buffers()]
    if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
        raise TypeError(REDUCED_TWICE)
    remember(model)
    broadcast_tensors(tensors, backend or detect(tensors))


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], backend: Backend) -> None:
    """Copy the tensors of rank 0 to every rank, in place. Every rank has to call it, with the same shapes."""
    if backend.world.size == 1 or not tensors:
        return
    is_source = torch.tensor([backend.world.rank == 0]).to(tensors[0].device)  # (1,): as data, in one graph for all
    values = [_summable(tensor) for tensor in tensors]
    sums = [torch.where(is_source.view((1,) * value.dim()), value, torch.zeros_like(value)) for value in values]
    backend.all_reduce_sum(sums)
    for tensor, total in zip(tensors, sums, strict=True):
        tensor.copy_(total.to(tensor.dtype))
    backend.mark_step()


def compare_ranks(updater: Updater, loop: Loop, inner: Optimizer, backend: Backend) -> None:
    """Compare the ranks before the first update; they also agree on the parameters that have gradients.

    Raises:
        RuntimeError: on every rank, if they differ.
    """
    if backend.world.size > 1:
        of_update = facts_of_update(updater, inner, backend)  # before the sampler's, which noise has changed
        facts = {**loop.clock.state_dict(), **of_update, **facts_of_sampler(loop.sampler)}
        growing = loop.sampler.planning.growing
        words = {} if growing is None else {CONTROLLER: growing.trace.description}
        check_same_on_all_ranks(facts, backend, updater.parameters[0].device, words)
        names = updater.gradient.step_means.names_of_step
        check_same_names(names, "log()", backend, updater.parameters[0].device)
        updater.gradient.agree()
    check_seen(updater.parameters, loop.sampler)
    updater.gradient.agreed = True


def check_same_on_all_ranks(
    facts: Mapping[str, int], backend: Backend, device: torch.device, words: Mapping[str, str] | None = None
) -> None:
    """Check that these integers are the same on every rank. Every rank has to call it.

    Args:
        facts: name -> integer in [0, 2**64), with the same names in the same order on every rank.
        backend: how ranks communicate.
        device: device on which they communicate.
        words: what some of the integers stand for, on this rank.

    Raises:
        RuntimeError: if one differs; on every rank, with its name, two values, and a rank that has each.
    """
    digits = [fact // _BASE**place % _BASE for fact in facts.values() for place in range(_DIGITS)]
    rows = backend.all_gather_floats(digits, device).long().view(backend.world.size, len(facts), _DIGITS)
    for rank in range(1, backend.world.size):
        for name, first, other in zip(facts, rows[0].tolist(), rows[rank].tolist(), strict=True):
            if first != other:
                here = f" (here {words[name]})" if words and name in words else ""
                remedy = _REMEDIES.get(name, "pass the same value on every rank")
                raise RuntimeError(
                    f"all ranks must train with the same {name}, but it is {_from_digits(first)} on rank 0 and "
                    f"{_from_digits(other)} on rank {rank}{here}; {remedy}"
                )


def check_same_names(names: Sequence[str], method: str, backend: Backend, device: torch.device) -> None:
    """Check that all ranks have passed values under the same names. Every rank has to call it.

    Raises:
        RuntimeError: on every rank, if not.
    """
    rows = backend.all_gather_floats(names_checksum(names), device)  # (ranks, 2)
    if not (rows == rows[0]).all():
        raise different_names(names, method, backend)


def names_checksum(names: Sequence[str]) -> tuple[int, int]:
    """Return a checksum as two halves that float32 represents."""
    crc = zlib.crc32(json.dumps(names).encode())
    return crc >> 16, crc & 0xFFFF


def different_names(names: Sequence[str], method: str, backend: Backend) -> RuntimeError:
    """Return the error for ranks that have passed different names to a method. Every rank has to call it."""
    by_rank = [json.loads(message) for message in backend.all_gather_bytes(json.dumps(names).encode())]
    rank, other = next((rank, other) for rank, other in enumerate(by_rank) if other != by_rank[0])
    return RuntimeError(
        f"every rank must add values under the same names, but rank 0 has {', '.join(by_rank[0]) or 'none'} and rank "
        f"{rank} has {', '.join(other) or 'none'}; call {method} for every microbatch on every rank"
    )


def checksum(parameters: Iterable[Tensor], backend: Backend) -> int:
    """Return the CRC-32 of the bytes of the parameters, in row-major order."""
    crc = 0
    for parameter in parameters:
        host = backend.host(parameter).contiguous()
        crc = zlib.crc32(host.view(-1).view(torch.uint8).numpy().data, crc)
    return crc


def facts_of_sampler(sampler: CustomSampler) -> dict[str, int]:
    """Return what samplers must have in common, as integers below 2**64."""
    plan, samples, growing = sampler.plan, sampler.fingerprint(), sampler.planning.growing
    controller = "" if growing is None else growing.trace.description
    return {
        CONTROLLER: zlib.crc32(controller.encode()),  # before the trace that it writes
        **{name: int(samples[name]) for name in ("dataset_size", "seed", "shuffle", "drop_last")},
        "trace": int(samples["trace"][:16], 16),
        "minibatch_size": plan.minibatch_size,
        "fixed_shape": int(plan.fixed_shape),
        "max_updates": plan.max_updates or 0,
        "max_samples": plan.max_samples or 0,
        "minimum number of microbatches": sampler.min_microbatches,
    }


def facts_of_update(updater: Updater, inner: Optimizer, backend: Backend) -> dict[str, int]:
    """Return what optimizers must have in common, as integers below 2**64."""
    options = without_addresses(f"{updater.rules} {updater.options}")
    return {
        "ref_batchsize": 0 if updater.ref_batchsize is None else updater.ref_batchsize,
        "rule, reduction, max_grad_norm, noise and other options": zlib.crc32(options.encode()),
        "inner optimizer, with its hyperparameters": zlib.crc32(_described(inner, backend).encode()),
        "number of parameters": len(updater.parameters),
        "order of gradients": zlib.crc32(repr(updater.gradient.reduction.order).encode()),
        "count= in step()": int(updater.gradient.token_count.used or False),
        "parameters": checksum(updater.parameters, backend),
    }


def _described(inner: Optimizer, backend: Backend) -> str:
    """Return the class of an optimizer and the plain hyperparameters of its groups."""
    groups = [
        {
            name: float(backend.host(value)) if isinstance(value, Tensor) and value.numel() == 1 else value
            for name, value in sorted(group.items())
            if name != "params" and isinstance(value, (bool, int, float, str, tuple, NoneType, Tensor))
        }
        for group in inner.param_groups
    ]
    return f"{type(inner).__name__} {groups}"


def _from_digits(digits: Sequence[int]) -> int:
    return sum(digit * _BASE**place for place, digit in enumerate(digits))


def _summable(tensor: Tensor) -> Tensor:
    """Return the same values in a dtype that every backend can sum: 16-bit integers, for example, become int64."""
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
