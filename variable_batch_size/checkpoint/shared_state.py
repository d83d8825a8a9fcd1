"""Whether ranks hold the same shared state: names and shapes at every save, and contents at some.

Contents are compared by digests of sums of integers: to the last bit, and as fast as memory is read. Of a sharded
tensor the ranks that have the same part of it hold the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from variable_batch_size.checkpoint.shards import Part

ROUNDING = 1e-5  # of the norm of a tensor: what devices of different kinds may make of the same sums
_COLUMNS = 4093  # a prime number: the widths of matrices are no multiples of it


@final
class Summary(NamedTuple):
    """What one rank says of the shared state.

    Attributes:
        layout: digest of the names, dtypes and shapes of the tensors that all ranks have whole.
        contents: digests of these, and of those that a rank has in part; each by the digest of what these are. Empty
            if contents are not compared.
    """

    layout: str
    contents: dict[str, str]

    @staticmethod
    def of_tensors(tensors: Mapping[str, Tensor], *, compare: bool) -> Summary:
        """Return the summary of tensors by name; `compare` tells whether to read their contents."""
        described = _describe(tensors, with_digests=compare)
        layout = digest([[name, facts.dtype, facts.shape] for name, facts in described.items() if facts.whole])
        if not compare:
            return Summary(layout, {})
        contents = dict[str, str]()
        for whole in (True, False):  # of sharded ones other ranks may have other parts
            of_kind = {name: facts for name, facts in described.items() if facts.whole is whole}
            what = digest([[name, facts.dtype, facts.shape, facts.part] for name, facts in of_kind.items()])
            contents[what] = digest([facts.digest for facts in of_kind.values()])
        return Summary(layout, contents)


@final
class _Facts(NamedTuple):
    """What one rank has of a tensor.

    Attributes:
        whole: whether it has all of it.
        dtype: in words.
        shape: of the whole tensor.
        part: which part it has.
        digest: of the bytes of that; None if contents are not compared.
        sketch: see `_sketch`.
    """

    whole: bool
    dtype: str
    shape: list[int]
    part: Sequence[Any]
    digest: str | None
    sketch: list[list[float]] = []  # noqa: RUF012 (never changed)


def are_equal(summaries: Sequence[Summary]) -> bool:
    """Return whether no rank differs from another one in what they share."""
    first = dict[str, str]()
    same = all(
        first.setdefault(what, contents) == contents
        for summary in summaries
        for what, contents in summary.contents.items()
    )
    return same and len({summary.layout for summary in summaries}) == 1


def describe_as_text(tensors: Mapping[str, Tensor]) -> str:
    """Return what one rank has of each tensor, for `first_difference`."""
    described = _describe(tensors, with_digests=True)
    return json.dumps({name: facts._replace(sketch=_sketch(tensors[name])) for name, facts in described.items()})


def first_difference(texts: Sequence[str]) -> tuple[str, int, bool]:
    """Return the first tensor that is not the same on all ranks, a rank that has another one, and if by rounding only.

    A tensor that differs by more than rounding comes first. The two are told apart by the norms and sums of some of
    their elements, relative to the norm.
    """
    ranks = [{name: _Facts(*row) for name, row in json.loads(text).items()} for text in texts]
    rounded: tuple[str, int, bool] | None = None
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        by_part = dict[str, _Facts | None]()
        is_whole = any(rank[name].whole for rank in ranks if name in rank)
        for number, facts in enumerate(rank.get(name) for rank in ranks):
            whole = facts.whole if facts else is_whole
            first = by_part.setdefault("" if whole else json.dumps(facts and facts.part), facts)
            if (facts or whole) and first != facts:
                if not (first and facts and first[:4] == facts[:4] and _are_close(first.sketch, facts.sketch)):
                    return name, number, False
                rounded = rounded or (name, number, True)
    return rounded or ("the order of the tensors", 1, False)


def _sketch(tensor: Tensor) -> list[list[float]]:
    """Return the norms and the sums of every eighth element, of eight kinds; none of numbers that are not real."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.is_floating_point():
        return []
    flat = local.detach().reshape(-1)
    kinds = [flat[first::8].double() for first in range(8)]
    return [[float(elements.norm()) for elements in kinds], [float(elements.sum()) for elements in kinds]]


def _are_close(first: list[list[float]], other: list[list[float]]) -> bool:
    """Return whether two sketches differ by no more than rounding does."""
    if not first or not other:
        return False
    scale = math.hypot(*first[0])
    return all(
        abs(a - b) <= ROUNDING * scale for pair in zip(first, other, strict=True) for a, b in zip(*pair, strict=True)
    )


def _describe(tensors: Mapping[str, Tensor], *, with_digests: bool) -> dict[str, _Facts]:
    """Return what this rank has of each tensor; sharded ones without an element here are left out."""
    here = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor) or tensor.to_local().numel():
            here[name] = tensor
    digests = byte_digests(here) if with_digests else {}
    return {
        name: _Facts(
            not isinstance(tensor, DTensor), str(tensor.dtype), [*tensor.shape], Part.on_rank(tensor), digests.get(name)
        )
        for name, tensor in here.items()
    }


def byte_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of the bytes of each tensor, which are read once, where they are.

    They are added up in `_COLUMNS` columns of integers of 8 bytes that wrap around, so that a value which moves to
    another place changes a sum, too, unless by a multiple of so many; these sums, and what is left, are hashed.
    """
    by_device = defaultdict[torch.device, dict[str, list[Tensor]]](dict)
    for name, tensor in tensors.items():
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        flat = local.resolve_conj().resolve_neg().contiguous().reshape(-1)
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
