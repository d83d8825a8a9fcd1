"""Compares before the first update what must be equal on all ranks, and broadcasts the parameters.

A "fact" is a value that must be equal on all ranks; facts are in dicts, by the names that errors use.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from variable_batch_size._validation import without_addresses
from variable_batch_size.adaptive.decided_trace import describe
from variable_batch_size.backend import Backend, detect
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.plan.state import ROWS
from variable_batch_size.optim.checks.normalization import check_remembered_models, remember_model
from variable_batch_size.optim.checks.same_updates import RanksDifferError
from variable_batch_size.optim.stage import FIRST_UPDATE
from variable_batch_size.optim.tensors.arithmetic import check_whole, local_parts, shard_coordinates
from variable_batch_size.optim.update import Updater

_UPDATE = "an update in which the ranks differ"
_SHOWN = 120  # characters of a value in an error

_REMEDIES = {
    "trace": "pass the same value on every rank; a controller must answer the same input in the same way on all",
    "parameters": "call vbs.broadcast_parameters(model) before the first update",
    "parameters that require gradients": "freeze the same on all ranks",
    "epoch": "call set_epoch with the same epoch on every rank, and restore the same checkpoint",
    "step": "restore the same checkpoint on every rank",
    "divisor of the number of microbatches": "train the same model on every rank, and create the same optimizers",
    ROWS: "pass the whole dataset on every rank, split with a seeded generator, or vbs.ArrivingBatches where each rank "
    "has rows of its own; if the rows only look unequal, pass fingerprint= to the sampler",
}


@torch.no_grad()
def broadcast_parameters(model: torch.nn.Module, backend: Backend | None = None) -> None:
    """Copy the parameters and buffers of rank 0 to every rank, in place. Every rank has to call it.

    Args:
        model: module with the same parameters and buffers, up to their values, on every rank.
        backend: how ranks communicate. Default: what fits the device of the parameters, see `vbs.backend.detect`.

    Raises:
        TypeError: if the model is sharded.
    """
    tensors = [*model.parameters(), *model.buffers()]
    remedy = (
        "begin with the same seed on every rank, or load one state with broadcast_from_rank0=True of "
        "torch.distributed.checkpoint.state_dict"
    )
    check_whole(tensors, "broadcast_parameters()", remedy)
    remember_model(model)
    broadcast_tensors(tensors, backend or detect(tensors))


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], backend: Backend) -> None:
    """Copy the tensors of rank 0 to every rank, in place. Every rank has to call it, with the same shapes."""
    if backend.world.size == 1 or not tensors:
        return
    # (1,). It is data, and no `if`, so that on XLA all ranks compile the same graph.
    is_source = torch.tensor([backend.world.rank == 0]).to(tensors[0].device)
    values = [_as_summable(tensor) for tensor in tensors]
    sums = [torch.where(is_source.view((1,) * value.dim()), value, torch.zeros_like(value)) for value in values]
    backend.all_reduce_sum(sums)
    for tensor, total in zip(tensors, sums, strict=True):
        tensor.copy_(total.to(tensor.dtype))
    backend.mark_step()


def compare_ranks(updater: Updater, sampler: Dealer, inner: Optimizer, backend: Backend, agreement: Agreement) -> None:
    """Compare before the first update what must be equal on all ranks: position, settings, data and parameters.

    The ranks also agree on the parameters that have gradients.

    Raises:
        RuntimeError: on every rank, if they differ.
    """
    # Read rows now, also for a state that is saved later and compares them: rows may depend on the epoch.
    content = sampler.content()
    if agreement.world.size > 1:
        # An error names the first value that differs. Different rules also make the sampler split steps differently.
        settings_of_updates = update_facts(updater, inner, backend)
        place = sampler.training.place  # epoch, step, and number of samples so far
        position = {**sampler.batches.position_state(place.position), "samples": place.samples}
        facts = {**position, **settings_of_updates, **sampler_facts(sampler)}
        check_same_facts(FIRST_UPDATE, facts, agreement)
        if all(agreement.gather(FIRST_UPDATE, content)):  # a rank whose rows are random has "": nothing to compare
            check_same_facts(FIRST_UPDATE, {ROWS: content}, agreement)
        _check_replicas(updater.parameters, backend, agreement)
    if agreement.world.size > 1 or not backend.alone:
        updater.stages.call("meet", agreement)  # stages compare what they have
    check_remembered_models(updater.parameters, sampler)
    updater.agreed = True


def name_difference(error: RanksDifferError, agreement: Agreement) -> None:
    """Find out which value of an update, such as `lr`, differs between ranks, and raise RuntimeError with its values.

    Before each update the ranks compare only a checksum of these values, and exchange the values themselves only here.
    Every rank has to call it.
    """
    remedy = "set it to one value on all ranks"
    for facts in error.updates:  # of several updates, the first one in which a fact differs is named
        if error.made:
            remedy = f"set it to one value on all ranks, and restore a checkpoint of at most {facts['step']} updates: "
            remedy += "the weights differ since"
        check_same_facts(_UPDATE, facts, agreement, remedy)


def check_same_facts(
    call: str, facts: Mapping[str, Any], agreement: Agreement, usual: str = "pass the same value on every rank"
) -> None:
    """Raise RuntimeError on every rank if a value that must be equal on all ranks differs. Every rank has to call it.

    Checksums are compared first, so that the values are exchanged only for an error.

    Args:
        call: the call in which the ranks compare them, for the error of a rank that waits.
        facts: values that JSON represents, by name.
        agreement: how the ranks compare them.
        usual: the remedy for facts without one of their own.
    """
    text = json.dumps(facts, default=str)
    if len(set(agreement.gather(call, hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    facts_of_rank_0, *facts_of_others = map(json.loads, agreement.gather(call, text))
    for rank, facts_of_rank in enumerate(facts_of_others, start=1):
        for name in {**facts_of_rank_0, **facts_of_rank}:
            pair = str(facts_of_rank_0.get(name)), str(facts_of_rank.get(name))
            if pair[0] != pair[1]:
                value, differing = _excerpts_of_difference(*pair)
                raise RuntimeError(
                    f"all ranks must train with the same {name}, but it is {value} on rank 0 and {differing} on rank "
                    f"{rank}; {_REMEDIES.get(name, usual)}"
                )


def _check_replicas(parameters: Sequence[Tensor], backend: Backend, agreement: Agreement) -> None:
    """Raise RuntimeError on every rank if two ranks hold the same part of sharded parameters with different values."""
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if not sharded:
        return
    coordinates = json.dumps([shard_coordinates(parameter) for parameter in sharded])  # say which part this rank has
    holders: dict[str, tuple[int, int]] = {}  # coordinates -> the first rank that has this part, and its checksum
    by_rank = agreement.gather(FIRST_UPDATE, json.dumps([coordinates, checksum(local_parts(sharded), backend)]))
    for rank, (coordinates_of_rank, crc) in enumerate(map(json.loads, by_rank)):
        first, expected_crc = holders.setdefault(coordinates_of_rank, (rank, crc))
        if crc != expected_crc:
            raise RuntimeError(
                f"ranks {first} and {rank} hold the same part of sharded parameters, but with other values; begin with "
                "the same seed on every rank, or load one state with set_state_dict() and broadcast_from_rank0=True"
            )


def check_names(method: str, by_rank: Sequence[Sequence[str]]) -> None:
    """Raise RuntimeError unless all ranks have passed values to a method under the same names, here by rank."""
    for rank, names in enumerate(by_rank):
        if names != by_rank[0]:
            raise RuntimeError(
                f"every rank must add values under the same names, but rank 0 has {', '.join(by_rank[0]) or 'none'} "
                f"and rank {rank} has {', '.join(names) or 'none'}; call {method} for every microbatch on every rank"
            )


def checksum(parameters: Iterable[Tensor], backend: Backend) -> int:
    """Return the CRC-32 of the bytes of the parameters, by which ranks compare them without exchanging them."""
    crc = 0
    for parameter in parameters:
        host = backend.host(parameter).contiguous()
        crc = zlib.crc32(host.view(-1).view(torch.uint8).numpy().data, crc)
    return crc


def sampler_facts(sampler: Dealer) -> dict[str, Any]:
    """Return the settings of a sampler that ranks compare, by name. An error names the first one that differs."""
    plan, decided, split = sampler.plan, sampler.batches.decided, sampler.batches.split
    return {
        # Before the trace, which a controller chooses.
        "controller with its arguments": None if decided is None else describe(decided.adaptive),
        **sampler.batches.fingerprint(),
        "minibatch_size": plan.minibatch_size,
        "fixed_shape": plan.fixed_shape,
        "max_updates": plan.max_updates,
        "max_samples": plan.max_samples,
        "divisor of the number of microbatches": sampler.dealing.multiple_of,
        "equal_rounds": split.equal_rounds,
        "speeds": () if split.unequal is None else split.unequal.speeds,
        **sampler.facts,
    }


def update_facts(updater: Updater, inner: Optimizer, backend: Backend) -> dict[str, Any]:
    """Return the settings of an optimizer that ranks compare, by name, and a checksum of its unsharded parameters."""
    unsharded = (parameter for parameter in updater.parameters if not isinstance(parameter, DTensor))
    return {**_facts_of_update(updater, inner, backend), "parameters": checksum(unsharded, backend)}


def _facts_of_update(updater: Updater, inner: Optimizer, backend: Backend) -> dict[str, Any]:
    """Return the settings that updates depend on, by name, without the values of the parameters."""
    return {
        "ref_batchsize": updater.ref_batchsize,
        "rule": without_addresses(repr(updater.rules)),
        **updater.options._asdict(),
        "skip_grad_norm": without_addresses(repr(updater.options.skip_grad_norm)),
        "inner optimizer": type(inner).__name__,
        "number of parameter groups": len(inner.param_groups),
        **_hyperparameters(inner, backend),
        "number of parameters": len(updater.parameters),
        "way to sum gradients": type(updater.sum).__name__,
        **{name: value for settings in updater.stages.calls("settings") for name, value in settings().items()},
    }


def common_facts(updater: Updater, sampler: Dealer, inner: Optimizer, backend: Backend) -> dict[str, Any]:
    """Return what replicas of the model, which come and go, compare in each update, by name.

    The values of the parameters are compared at the first update only.
    """
    values = {} if sampler.position.step else {"parameters": checksum(local_parts(updater.parameters), backend)}
    settings = _facts_of_update(updater, inner, backend)
    return {**settings, **sampler_facts(sampler), ROWS: sampler.content(), **values}


def _hyperparameters(inner: Optimizer, backend: Backend) -> dict[str, Any]:
    """Return the hyperparameters of the parameter groups, as floats or text to be compared, by name and group."""
    plain = (bool, int, float, str, tuple, NoneType, Tensor)
    return {
        f"{name} of parameter group {number}": (
            float(backend.host(value)) if isinstance(value, Tensor) and value.numel() == 1 else str(value)
        )
        for number, group in enumerate(inner.param_groups)
        for name, value in sorted(group.items())
        if name != "params" and isinstance(value, plain)
    }


def _excerpts_of_difference(first: str, other: str) -> tuple[str, str]:
    """Return two texts, shortened to `_SHOWN` characters around their first difference if one of them is longer."""
    is_long = max(len(first), len(other)) > _SHOWN
    pairs = enumerate(zip(first, other, strict=False))
    differing = (position for position, (character, other_character) in pairs if character != other_character)
    num_equal = next(differing, min(len(first), len(other)))  # number of equal characters at the beginning
    begin = max(0, num_equal - _SHOWN // 2) if is_long else 0

    def excerpt(text: str) -> str:
        """Return `_SHOWN` characters of the text, with dots where it is cut off."""
        dots_before = "..." if begin else ""
        dots_after = "..." if len(text) > begin + _SHOWN else ""
        return dots_before + text[begin : begin + _SHOWN] + dots_after

    return excerpt(first), excerpt(other)


def _as_summable(tensor: Tensor) -> Tensor:
    """Return a tensor's values in a dtype that every backend can sum: 16-bit integers, for example, become int64."""
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
