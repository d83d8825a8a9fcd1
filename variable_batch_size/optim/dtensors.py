"""Tensors of which each rank holds a part (DTensors): sums over all of them, from what this rank has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate


@torch.no_grad()
def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the part of each tensor that this rank has, in the same memory; of an ordinary tensor itself."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def are_parts(tensors: Iterable[Tensor]) -> bool:
    """Return whether a tensor is a DTensor."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def summed(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor whose parts on several ranks are not still to be added, placed as another one.

    Args:
        tensor: any tensor. The gradient of a parameter that several ranks have may still be the sum of theirs.
        like: its parameter. Default: what must be added is replicated.
    """
    if not isinstance(tensor, DTensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    own = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=like.placements if isinstance(like, DTensor) else own)


def groups_of_parts(tensors: Iterable[Tensor]) -> list[tuple[list[Tensor], list[ProcessGroup]]]:
    """Return the parts that this rank has, with the groups of ranks that have the others of the same tensors.

    A tensor that is the same on several ranks is counted once by a sum over these groups.
    """
    found: dict[tuple[object, ...], tuple[list[Tensor], list[ProcessGroup]]] = {}
    for tensor in tensors:
        whole, groups = summed(tensor), list[ProcessGroup]()
        key: tuple[object, ...] = ()
        if isinstance(whole, DTensor):
            mesh = whole.device_mesh
            split = [dim for dim, placement in enumerate(whole.placements) if not placement.is_replicate()]
            key, groups = (mesh, *split), [mesh.get_group(dim) for dim in split]
        found.setdefault(key, ([], groups))[0].extend(local([whole]))
    return [*found.values()]


def shard_of(tensor: DTensor) -> list[int]:
    """Return which part of a tensor this rank has: its coordinates in the dimensions of the mesh that split it."""
    coordinate = tensor.device_mesh.get_coordinate() or []
    pairs = zip(coordinate, tensor.placements, strict=True)
    return [index for index, placement in pairs if not placement.is_replicate()]


def check_whole(tensors: Sequence[Tensor], what: str, remedy: str) -> None:
    """Raise TypeError if a tensor is sharded.

    Args:
        tensors: the tensors.
        what: what needs whole ones, in words.
        remedy: what to do.
    """
    if are_parts(tensors):
        raise TypeError(f"{what} needs whole tensors, but the model is sharded (its parameters are DTensors); {remedy}")
