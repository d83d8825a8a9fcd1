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
    """The digests, by name, of what may differ between ranks, as one rank has it.

    Attributes:
        tensors: of tensors, with dtype and shape.
        parts: of the JSON of each part, which has everything but the tensors.
    """

    tensors: Mapping[str, str]
    parts: Mapping[str, str]

    @staticmethod
    def of_state(tensors: Mapping[str, Tensor], parts: Mapping[str, Json]) -> Own:
        """Return digests (hashes) of tensors, on the host or a GPU, and of the JSON of parts; all are given by name."""
        digests = byte_digests(tensors)
        tensor_digests = {name: f"{digests[name]} {tensor.dtype} {[*tensor.shape]}" for name, tensor in tensors.items()}
        return Own(tensor_digests, {name: digest(part) for name, part in parts.items()})


def find_own(ranks: Sequence[Own]) -> PerRank:
    """Return the names of the tensors and parts that are not the same on all ranks, so that each rank saves its own.

    Args:
        ranks: the digests (hashes) of each rank, by name.

    Raises:
        RuntimeError: if a rank lacks a part that another one has.
    """
    for name in sorted({name for own in ranks for name in own.parts}):
        if lacking := [rank for rank, own in enumerate(ranks) if name not in own.parts]:
            raise RuntimeError(
                f"every rank must save the same parts, but rank {lacking[0]} has no {name}; pass it to Checkpoint on "
                f"every rank"
            )
    return PerRank(_differing([own.tensors for own in ranks]), _differing([own.parts for own in ranks]))


def _differing(ranks: Sequence[Mapping[str, str]]) -> frozenset[str]:
    """Return the names under which not all ranks have the same digest; a rank without the name differs, too."""
    names = {name for digests in ranks for name in digests}
    return frozenset(name for name in names if len({digests.get(name) for digests in ranks}) > 1)


def describe_shared(tensors: Mapping[str, Tensor], *, contents: bool) -> dict[str, Described]:
    """Describe what this rank has of each shared tensor; sharded ones without an element on this rank are left out.

    A shared tensor must be equal on all ranks or, if it is sharded, on all ranks that have the same part of it.

    Args:
        tensors: by name.
        contents: whether to compute digests of the contents, which reads all of the memory.
    """
    on_rank = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor) or tensor.to_local().numel():
            on_rank[name] = tensor
    digests = byte_digests(on_rank) if contents else {}
    described = dict[str, Described]()
    for name, tensor in on_rank.items():
        is_whole, part = not isinstance(tensor, DTensor), Part.on_rank(tensor)
        described[name] = [is_whole, str(tensor.dtype), [*tensor.shape], part, digests.get(name)]
    return described


def summarize(described: Mapping[str, Described], own: Own) -> dict[str, str]:
    """Return three digests by key, which ranks exchange to find out whether they differ.

    Two ranks that have the same key should have the same digest under it. The keys are "whole" for tensors that are not
    sharded, `OWN` for what may differ between ranks, and for sharded tensors a digest of the list of parts that this
    rank has: ranks with the same parts have this key, and must have the same contents.

    Args:
        described: what `describe_shared` returned.
        own: digests of what may differ.
    """
    # The first entry of a description tells whether the tensor is whole, the last one is the digest of its contents.
    rows_of_whole = [[name, *row] for name, row in described.items() if row[0]]
    rows_of_sharded = [[name, *row] for name, row in described.items() if not row[0] and row[-1] is not None]
    which_parts, contents = digest([row[:-1] for row in rows_of_sharded]), digest([row[-1] for row in rows_of_sharded])
    return {"whole": digest(rows_of_whole), OWN: digest(own), which_parts: contents}


def differing_keys(summaries: Sequence[Mapping[str, str]]) -> set[str]:
    """Return the keys under which two ranks have different digests (hashes); a rank may lack a key.

    Args:
        summaries: what `summarize` returned on each rank.
    """
    digests_by_key = defaultdict[str, set[str]](set)
    for summary in summaries:
        for key, value in summary.items():
            digests_by_key[key].add(value)
    return {key for key, digests in digests_by_key.items() if len(digests) > 1}


def add_sketches(described: Mapping[str, Described], tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return the descriptions of tensors with a sketch at their end: some norms and sums of the tensor.

    From the sketches of two ranks `first_difference` tells whether a tensor differs only by rounding.
    """
    return {name: [*row, _sketch(tensors[name])] for name, row in described.items()}


def first_difference(ranks: Sequence[Mapping[str, list[Any]]]) -> tuple[str, int, bool]:
    """Return the name of a tensor that is not the same on all ranks, a rank that differs, and whether only by rounding.

    A tensor that differs by more than rounding takes precedence over one that differs by rounding only. The two are
    told apart by the norms and sums of some of their elements, relative to the norm.

    Args:
        ranks: what `add_sketches` returned on each rank: a row for each tensor, see `Described`, with a sketch.
    """
    differs_by_rounding: tuple[str, int, bool] | None = None
    for name in dict.fromkeys(name for rows in ranks for name in rows):
        is_whole_anywhere = any(rows[name][0] for rows in ranks if name in rows)
        first_by_part = dict[str, list[Any] | None]()  # the row of the first rank that has this part; "": of whole ones
        for rank, rows in enumerate(ranks):
            row = rows.get(name)
            is_whole = row[0] if row else is_whole_anywhere
            part = "" if is_whole else json.dumps(row and row[3])
            first = first_by_part.setdefault(part, row)
            if (row or is_whole) and first != row:  # a rank may lack a sharded tensor: it has no element of it
                # The first four entries are all but the contents: with others it is not the same tensor at all.
                if not (first and row and first[:4] == row[:4] and _are_close(first[-1], row[-1])):
                    return name, rank, False
                differs_by_rounding = differs_by_rounding or (name, rank, True)
    return differs_by_rounding or ("the order of the tensors", 1, False)


def _sketch(tensor: Tensor) -> list[list[float]]:
    """Return 8 norms and 8 sums of elements of a tensor, by which ranks tell rounding from a larger difference.

    Number i of each is of the elements i, i + 8, i + 16, ... A tensor that is not of floating point has [].
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.is_floating_point():
        return []
    subsets = [local.detach().reshape(-1)[first_element::8].double() for first_element in range(8)]
    return [[float(elements.norm()) for elements in subsets], [float(elements.sum()) for elements in subsets]]


def _are_close(first: list[list[float]], other: list[list[float]]) -> bool:
    """Return whether two sketches differ by no more than rounding does, relative to the norm of the whole tensor."""
    if not first or not other:  # not of floating point: any difference is one
        return False
    (norms, sums), (other_norms, other_sums) = first, other
    norm_of_tensor = math.hypot(*norms)
    pairs = zip(norms + sums, other_norms + other_sums, strict=True)
    return all(abs(a - b) <= ROUNDING * norm_of_tensor for a, b in pairs)


def byte_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of the bytes of each tensor, by name; the device of the tensor reads them once.

    Only some sums go to the host, which hashes them, so that large tensors need not be copied. The bytes are taken as
    integers of 8 bytes, in rows of `_COLUMNS`, and each column is added up, with overflow. A value that moves to
    another place changes two sums, unless it moves by a multiple of `_COLUMNS`. These sums, and what is left after the
    last whole row, are hashed.
    """
    by_device = defaultdict[torch.device, dict[str, list[Tensor]]](dict)
    for name, tensor in tensors.items():
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        flat = local.resolve_conj().resolve_neg().contiguous().as_strided((local.numel(),), (1,))
        if flat.storage_offset() * flat.element_size() % 8:  # view(torch.int64) needs memory that is aligned
            flat = flat.clone()
        if flat.dtype is not torch.uint8:
            flat = flat.view(torch.uint8)
        words = flat[: len(flat) // 8 * 8].view(torch.int64)
        rows = len(words) // _COLUMNS
        in_rows, after_rows = words[: rows * _COLUMNS], words[rows * _COLUMNS :]
        sums = in_rows.view(rows, _COLUMNS).sum(0) if rows > 1 else in_rows
        last_bytes = torch.nn.functional.pad(flat[len(words) * 8 :], (0, -len(flat) % 8)).view(torch.int64)
        by_device[local.device][name] = [sums, after_rows, last_bytes]
    digests = dict[str, str]()
    for hashed_by_name in by_device.values():
        joined = torch.cat([numbers for hashed in hashed_by_name.values() for numbers in hashed])
        host = joined.cpu().numpy()  # one copy, and so one wait, for each device
        for name, hashed in hashed_by_name.items():
            size = sum(map(len, hashed))
            digests[name], host = hashlib.sha256(host[:size].tobytes()).hexdigest()[:16], host[size:]
    return digests


def digest(value: Any) -> str:
    """Return the SHA-256 of the JSON of a value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
