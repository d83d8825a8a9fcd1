"""The format of a checkpoint, `vbs-checkpoint` version 1: one JSON text, and files of tensors in safetensors' layout.

`KEYS` is the one list of the JSON's keys. Values that JSON has not are objects with the key "$", which names their
type. Nothing of what is read is executed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

FORMAT: Final = "vbs-checkpoint"
VERSION: Final = 1
MANIFEST: Final = "checkpoint.json"
RANDOM: Final = "random"  # the key of the RNG states, with which the names of their tensors begin

# A key that readers may ignore, and for which they have a default, is added without another version.
KEYS: Final = {
    *("format", "version", "seal", "library", "torch"),  # of the JSON itself
    *("epoch", "step", "samples", "updates", "reads_epoch", "world", "batch_size"),  # the position
    *("trace", "dataset_size", "seed", "shuffle", "drop_last"),  # what the samples follow from
    *("best", "metrics"),  # what was reported
    *("state", RANDOM, "tensors", "files"),  # states, and where their tensors are
}

Json: TypeAlias = Any

_TAG, _OF = "$", "of"
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "Size"}
DTYPES: Final = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


@final
class VersionError(ValueError):
    """A checkpoint has a version of the format that this library does not know."""


@final
class Encoded(NamedTuple):
    """A value as JSON, which has the names of its tensors.

    Attributes:
        json: the value.
        tensors: by name, each once.
    """

    json: Json
    tensors: dict[str, Tensor]


# Values. -------------------------------------------------------------------------------------------------------------


def encode(value: Any, name: str = "") -> Encoded:
    """Return a value as JSON, and its tensors by names that follow from their places in it.

    Args:
        value: tensors and plain Python values in containers: dict, list, tuple, set, frozenset, OrderedDict, Counter;
            None, bool, int, float, complex, str, bytes; torch's dtype, device and Size.
        name: what names begin with.

    Raises:
        TypeError: if there is a value of another type.

    >>> encode({"lr": 0.1, 3: (1, float("inf"))}).json
    {'$': 'dict', 'of': [['lr', 0.1], [3, {'$': 'tuple', 'of': [1, {'$': 'float', 'of': 'inf'}]}]]}
    """
    tensors, names = dict[str, Tensor](), dict[object, str]()

    def visit(value: Any, name: str) -> Json:
        kind = type(value)
        if isinstance(value, DTensor) or (isinstance(value, Tensor) and _is_plain(value)):
            if value.layout is torch.sparse_coo:
                parts = value.detach()._indices(), value.detach()._values()
                of = [visit(part, _join(name, index)) for index, part in enumerate((*parts, [*value.shape]))]
                return {_TAG: "sparse_coo", _OF: of, "coalesced": value.is_coalesced()}
            view = identity(value)
            if view not in names:
                names[view] = _free(name, tensors)
                tensors[names[view]] = value.detach()
            return {_TAG: "tensor", _OF: names[view]}
        if kind in (bool, int, str) or value is None:
            return value
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", _OF: repr(value)}
        if kind is list:
            return [visit(item, _join(name, index)) for index, item in enumerate(value)]
        if kind is dict and all(type(key) is str for key in value) and _TAG not in value:
            return {key: visit(item, _join(name, key)) for key, item in value.items()}
        if kind in _DICTS:
            found: dict[str, Json] = {_TAG: _DICTS[kind]}
            found[_OF] = [
                [visit(key, _join(name, "key")), visit(item, _join(name, key))] for key, item in value.items()
            ]
            if kind is OrderedDict and vars(value):  # `_metadata`: the versions of a model's modules
                found["attributes"] = visit(vars(value), _join(name, "attributes"))
            return found
        if kind in _SEQUENCES:
            return {_TAG: _SEQUENCES[kind], _OF: [visit(item, _join(name, index)) for index, item in enumerate(value)]}
        if kind is complex:
            return {_TAG: "complex", _OF: [visit(value.real, ""), visit(value.imag, "")]}
        if kind is bytes:
            return {_TAG: "bytes", _OF: base64.b64encode(value).decode()}
        if kind in (torch.dtype, torch.device):
            return {_TAG: kind.__name__, _OF: str(value).removeprefix("torch.")}
        other = f"a {kind.__module__}.{kind.__qualname__}"
        if isinstance(value, Tensor):
            other += f" of layout {value.layout} on device {value.device}"
        raise TypeError(
            f"a checkpoint can hold only tensors and plain Python values, got {other} at {name}; return numbers, "
            f"strings, lists and dicts from that part's state_dict()"
        )

    try:
        return Encoded(visit(value, name), tensors)
    except RecursionError:
        raise TypeError(
            f"a checkpoint can hold values in a few containers, got endless or very deep ones at {name}"
        ) from None


def decode(value: Json, tensor: Callable[[str], Tensor]) -> Any:
    """Return the value that was encoded.

    Args:
        value: JSON of `encode`.
        tensor: returns a tensor by its name.

    Raises:
        ValueError: if it is none.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, tensor) for key, item in value.items()}
    kind, of = value[_TAG], value[_OF]
    if kind == "tensor":
        return tensor(of)
    if kind == "sparse_coo":
        indices, values, shape = (decode(part, tensor) for part in of)
        coalesced = value["coalesced"] or None
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)
    if kind in _PARSED:
        return _PARSED[kind](of)
    if kind in _BY_NAME:
        made = _BY_NAME[kind](decode(item, tensor) for item in of)
        if "attributes" in value:
            vars(made).update(decode(value["attributes"], tensor))
        return made
    raise ValueError(f"a value has the unknown type {kind!r}")


def _pairs(kind: type) -> Callable[[Any], Any]:
    def make(items: Any) -> Any:
        made = kind()
        for key, item in items:
            made[key] = item
        return made

    return make


_PARSED: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda of: complex(*(decode(part, _no_tensor) for part in of)),
    "bytes": base64.b64decode,
    "dtype": lambda of: DTYPES[of],
    "device": torch.device,
}
_BY_NAME: dict[str, Callable[[Any], Any]] = {
    **{name: kind for kind, name in _SEQUENCES.items()},
    **{name: _pairs(kind) for kind, name in _DICTS.items()},
}


def _no_tensor(name: str) -> Tensor:
    raise ValueError(f"{name} is no number")


def described(tensor: Tensor) -> dict[str, Json]:
    """Return what the JSON says of a tensor: dtype, shape and, if it is a permutation of contiguous memory, stride."""
    facts: dict[str, Json] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape]}
    if not isinstance(tensor, DTensor) and not tensor.is_contiguous():
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        if tensor.permute(order).is_contiguous():
            facts["stride"] = [*strides]
    return facts


def identity(tensor: Tensor) -> object:
    """Return what is equal for tensors that are the same view of the same memory: a checkpoint has them once."""
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.placements, identity(tensor._local_tensor)  # which lives as long as the DTensor
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda") or not tensor.numel():
        return id(tensor)
    view = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return *view, tensor.is_conj(), tensor.is_neg()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided or of coordinates, and of no subclass but parameters and buffers."""
    known = (tensor.layout is torch.strided and not tensor.is_nested) or tensor.layout is torch.sparse_coo
    return known and not tensor.is_meta and not tensor.is_quantized and type(tensor.detach()) is Tensor


def _join(name: str, key: object) -> str:
    return f"{name}/{key}" if name else str(key)


def _free(name: str, taken: Mapping[str, object]) -> str:
    number, free = 1, name
    while free in taken:  # keys of a dict can have the same text
        number += 1
        free = f"{name}#{number}"
    return free


# The JSON of a checkpoint. -------------------------------------------------------------------------------------------


def dumps(contents: Mapping[str, Json]) -> str:
    """Return the text of a checkpoint's JSON, with the version of the format, and sealed by its SHA-256."""
    facts = {"format": FORMAT, "version": VERSION, **contents}
    if unknown := facts.keys() - KEYS:
        raise ValueError(f"the keys of a checkpoint's JSON must be in KEYS, got {', '.join(sorted(unknown))}; add them")
    return _sealed(facts)


def loads(text: str) -> dict[str, Json]:
    """Return the contents of a text that `dumps` returned, with the seal.

    Raises:
        VersionError: if it has another version.
        ValueError: if it is not intact.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"it is no JSON of {FORMAT}")
    if type(found.get("version")) is not int:
        raise ValueError("its version is no number")
    if found["version"] != VERSION:
        raise VersionError(
            f"it has version {found.get('version')} of the format {FORMAT}, but this library reads version {VERSION}"
        )
    seal = found.pop("seal", None)
    if _sealed(found) != text:
        raise ValueError("its checksum is another one")
    return {**found, "seal": seal}


def _sealed(facts: Mapping[str, Json]) -> str:
    seal = hashlib.sha256(json.dumps(facts, allow_nan=False).encode()).hexdigest()
    return json.dumps({**facts, "seal": seal}, allow_nan=False) + "\n"
