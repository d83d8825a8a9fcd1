"""Whether ranks hold the same state: by digests at each save, name by name only where these differ.

What optimizers update has to be the same on all ranks; of a sharded tensor, on those that have the same part. It is
compared by names and shapes at every save, and by contents at some. Whatever else differs, as buffers that forward
writes and parts that count for themselves, is saved for each rank: a training in a world of the same size gets it
again, rank by rank, and in another one all ranks get what rank 0 had.

Contents are compared by digests of sums of integers: to the last bit, and as fast as memory is read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from variable_batch_size.checkpoint.shards import Part
from variable_batch_size.checkpoint.values import Json

ROUNDING = 1e-5  # of the norm of a tensor: what devices of different kinds may make of the same sums
_COLUMNS = 4093  # a prime number: the widths of matrices are no multiples of it
OWN = "own"  # key of a summary, beside "whole" and those of parts

Described: TypeAlias = list[Any]  # of a tensor: whether this rank has it whole, dtype, shape, its part, digest or None


@final
class PerRank(NamedTuple):
    """The names of the tensors and of the parts that each rank has for itself."""

    tensors: Set[str] = frozenset()
    parts: Set[str] = frozenset()

    def __or__(self, other: PerRank) -> PerRank:
        return PerRank(self.tensors | other.tensors, self.parts | other.parts)


@final
class Own(NamedTuple):
    """What one rank says of that which ranks do not share: digests of tensors and of what else is in parts, by name."""

    tensors: Mapping[str, str]
    parts: Mapping[str, str]

    @staticmethod
    def of_state(tensors: Mapping[str, Tensor], parts: Mapping[str, Json]) -> Own:
        """Return what a rank says of these tensors, of the host or a GPU, and of these parts."""
        digests = byte_digests(tensors)
        of_tensors = {name: f"{digests[name]} {tensor.dtype} {[*tensor.shape]}" for name, tensor in tensors.items()}
        return Own(of_tensors, {name: digest(part) for name, part in parts.items()})


def find_own(ranks: Sequence[Own]) -> PerRank:
    """Return what is not the same on all ranks.

    Raises:
        RuntimeError: if a part is not on all of them.
    """
    for name in sorted({name for own in ranks for name in own.parts}):
        if without := [rank for rank, own in enumerate(ranks) if name not in own.parts]:
            raise RuntimeError(
                f"every rank must save the same parts, but rank {without[0]} has no {name}; pass it to Checkpoint on "
                f"every rank"
            )
    tensors, parts = (
        frozenset(name for own in by_rank for name in own if len({other.get(name) for other in by_rank}) > 1)
        for by_rank in zip(*ranks, strict=True)
    )
    return PerRank(tensors, parts)


def describe_shared(tensors: Mapping[str, Tensor], *, contents: bool) -> dict[str, Described]:
    """Return what this rank has of each shared tensor; sharded ones without an element here are left out."""
    here = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor) or tensor.to_local().numel():
            here[name] = tensor
    digests = byte_digests(here) if contents else {}
    described = dict[str, Described]()
    for name, tensor in here.items():
        is_whole, part = not isinstance(tensor, DTensor), Part.on_rank(tensor)
        described[name] = [is_whole, str(tensor.dtype), [*tensor.shape], part, digests.get(name)]
    return described


def summarize(described: Mapping[str, Described], own: Own) -> dict[str, str]:
    """Return digests that ranks which have the same key must share: of whole tensors, of parts, and of the rest."""
    whole = [[name, *row] for name, row in described.items() if row[0]]
    parts = [[name, *row] for name, row in described.items() if not row[0] and row[-1] is not None]
    by_parts = {digest([row[:-1] for row in parts]): digest([row[-1] for row in parts])}
    return {"whole": digest(whole), OWN: digest(own)} | by_parts


def differing_keys(summaries: Sequence[Mapping[str, str]]) -> set[str]:
    """Return the keys of summaries whose digests differ between ranks."""
    values = defaultdict[str, set[str]](set)
    for summary in summaries:
        for key, value in summary.items():
            values[key].add(value)
    return {key for key, found in values.items() if len(found) > 1}


def add_sketches(described: Mapping[str, Described], tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return what a rank has of each tensor, for `first_difference`, with norms and sums that tell rounding apart."""
    return {name: [*row, _sketch(tensors[name])] for name, row in described.items()}


def first_difference(ranks: Sequence[Mapping[str, list[Any]]]) -> tuple[str, int, bool]:
    """Return the first tensor that is not the same on all ranks, a rank that has another one, and if by rounding only.

    A tensor that differs by more than rounding comes first. The two are told apart by the norms and sums of some of
    their elements, relative to the norm.
    """
    rounded: tuple[str, int, bool] | None = None
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        is_whole = any(rank[name][0] for rank in ranks if name in rank)
        firsts = dict[str, list[Any] | None]()
        for number, row in enumerate(rank.get(name) for rank in ranks):
            whole = row[0] if row else is_whole
            first = firsts.setdefault("" if whole else json.dumps(row and row[3]), row)
            if (row or whole) and first != row:
                if not (first and row and first[:4] == row[:4] and _are_close(first[-1], row[-1])):
                    return name, number, False
                rounded = rounded or (name, number, True)
    return rounded or ("the order of the tensors", 1, False)


def _sketch(tensor: Tensor) -> list[list[float]]:
    """Return the norms and the sums of every eighth element, of eight kinds; none of numbers that are not real."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.is_floating_point():
        return []
    kinds = [local.detach().reshape(-1)[first::8].double() for first in range(8)]
    return [[float(elements.norm()) for elements in kinds], [float(elements.sum()) for elements in kinds]]


def _are_close(first: list[list[float]], other: list[list[float]]) -> bool:
    """Return whether two sketches differ by no more than rounding does."""
    if not first or not other:
        return False
    scale = math.hypot(*first[0])
    pairs = zip(first[0] + first[1], other[0] + other[1], strict=True)
    return all(abs(a - b) <= ROUNDING * scale for a, b in pairs)


def byte_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of the bytes of each tensor, which are read once, where they are.

    They are added up in `_COLUMNS` columns of integers of 8 bytes that wrap around, so that a value which moves to
    another place changes a sum, too, unless by a multiple of so many; these sums, and what is left, are hashed.
    """
    by_device = defaultdict[torch.device, dict[str, list[Tensor]]](dict)
    for name, tensor in tensors.items():
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        flat = local.resolve_conj().resolve_neg().contiguous().as_strided((local.numel(),), (1,))
        flat = flat if flat.storage_offset() * flat.element_size() % 8 == 0 else flat.clone()
        flat = flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)
        words = flat[: len(flat) // 8 * 8].view(torch.int64)
        rows = len(words) // _COLUMNS
        sums = words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0) if rows > 1 else words[: rows * _COLUMNS]
        rest = torch.nn.functional.pad(flat[len(words) * 8 :], (0, -len(flat) % 8)).view(torch.int64)
        by_device[local.device][name] = [sums, words[rows * _COLUMNS :], rest]
    digests = dict[str, str]()
    for parts in by_device.values():
        joined = torch.cat([part for sums_of_tensor in parts.values() for part in sums_of_tensor])
        host = joined.cpu().numpy()  # one wait for a device
        for name, sums_of_tensor in parts.items():
            size = sum(map(len, sums_of_tensor))
            digests[name], host = hashlib.sha256(host[:size].tobytes()).hexdigest()[:16], host[size:]
    return digests


def digest(value: Any) -> str:
    """Return the SHA-256 of a value that JSON has."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
