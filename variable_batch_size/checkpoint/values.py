"""A state as JSON, and its tensors by name. Nothing of what is read is executed.

Values that JSON has not are objects with the key "$", which names their type.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from variable_batch_size.checkpoint.tensor_file import DTYPES

Json: TypeAlias = Any

_TAG, _OF = "$", "of"
_MAPS: Final[dict[str, type]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_LISTS: Final[dict[str, type]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}
_SCALARS: Final[dict[str, tuple[type, Callable[[Any], Json], Callable[[Json], Any]]]] = {
    "float": (float, repr, float),  # which is infinite or not a number
    "complex": (complex, repr, complex),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), DTYPES.__getitem__),
    "device": (torch.device, str, torch.device),
}


def encode(value: Any, name: str, tensors: dict[str, Tensor], names: dict[object, str]) -> Json:
    """Return a value as JSON, and add its tensors to `tensors`, each once, named after its place in the value.

    Args:
        value: tensors and plain Python values in containers: dict, list, tuple, set, frozenset, OrderedDict, Counter;
            None, bool, int, float, complex, str, bytes; torch's dtype, device and Size.
        name: prefix of the names of the tensors, such as "model".
        tensors: the tensors by name; those of `value` are added.
        names: the names of the tensors by `identity`, so that one tensor at two places gets one name; also added to.

    Raises:
        TypeError: if there is a value of another type.

    >>> encode({"lr": 0.1, 3: (1, float("inf"))}, "", {}, {})
    {'$': 'dict', 'of': [['lr', 0.1], [3, {'$': 'tuple', 'of': [1, {'$': 'float', 'of': 'inf'}]}]]}
    """
    try:
        return _encode(value, name, tensors, names)
    except RecursionError:
        requirement = "a checkpoint can hold values in a few containers"
        raise TypeError(f"{requirement}, got endless or very deep ones at {name}; save a flat state") from None


def _encode(value: Any, name: str, tensors: dict[str, Tensor], names: dict[object, str]) -> Json:
    """Return a value as JSON, and add its tensors to `tensors`; `encode` calls it for each value within its argument.

    Args:
        value: the value.
        name: its place, such as "optimizer/state/0", under which its tensors are added.
        tensors: the tensors by name.
        names: the names of the tensors by `identity`.

    Raises:
        RecursionError: if the value contains itself.
        TypeError: if there is a value of a type that a checkpoint cannot hold.
    """
    kind = type(value)

    def encode_items(values: Iterable[Any]) -> list[Json]:
        return [_encode(item, f"{name}/{index}", tensors, names) for index, item in enumerate(values)]

    if isinstance(value, Tensor) and (isinstance(value, DTensor) or _is_plain(value)):
        return _encode_tensor(value, name, tensors, names)
    if kind in (bool, int, str) or value is None or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return encode_items(value)
    if kind is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encode(item, f"{name}/{key}", tensors, names) for key, item in value.items()}
    for tag, map_kind in _MAPS.items():
        if kind is map_kind:
            keys = encode_items(value)
            items = [_encode(item, f"{name}/{key}", tensors, names) for key, item in value.items()]
            encoded: dict[str, Json] = {_TAG: tag, _OF: [list(pair) for pair in zip(keys, items, strict=True)]}
            if kind is OrderedDict and vars(value):  # `_metadata`: the versions of a model's modules
                encoded["attributes"] = _encode(vars(value), f"{name}/attributes", tensors, names)
            return encoded
    for tag, list_kind in _LISTS.items():
        if kind is list_kind:
            items = encode_items(value)
            if kind in (set, frozenset):  # whose order depends on hashes, which differ between processes
                items.sort(key=json.dumps)
            return {_TAG: tag, _OF: items}
    for tag, (scalar_kind, to_json, _) in _SCALARS.items():
        if kind is scalar_kind:
            return {_TAG: tag, _OF: to_json(value)}
    other = f"a {kind.__module__}.{kind.__qualname__}"
    if isinstance(value, Tensor):
        other += f" of layout {value.layout} on device {value.device}"
    raise TypeError(
        f"a checkpoint can hold only tensors and plain Python values, got {other} at {name}; return numbers, strings, "
        f"lists and dicts from that part's state_dict()"
    )


def _encode_tensor(value: Tensor, name: str, tensors: dict[str, Tensor], names: dict[object, str]) -> Json:
    """Return the JSON of a tensor, which has its name, and add it, or the parts of a sparse one, to `tensors`.

    Arguments as for `_encode`. A tensor that is at two places, such as tied weights, is added once.
    """
    if value.layout is torch.sparse_coo:
        indices_and_values = value.detach()._indices(), value.detach()._values()
        encoded = [_encode(tensor, f"{name}/{index}", tensors, {}) for index, tensor in enumerate(indices_and_values)]
        return {_TAG: "sparse_coo", _OF: [*encoded, [*value.shape], value.is_coalesced()]}
    view = identity(value)
    if view not in names:  # otherwise the same tensor was at another place, as tied weights are
        names[view] = _free_name(name, tensors)
        tensors[names[view]] = value.detach()
    return {_TAG: "tensor", _OF: names[view]}


def decode(value: Json, tensor: Callable[[str], Tensor]) -> Any:
    """Return the value of which `encode` returned the JSON.

    Args:
        value: the JSON.
        tensor: returns a tensor by its name.

    Raises:
        ValueError, LookupError, TypeError: if `encode` returns no such JSON.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, tensor) for key, item in value.items()}
    kind, contents = value[_TAG], value[_OF]
    if kind == "tensor":
        return tensor(contents)
    if kind in _SCALARS:
        _, _, from_json = _SCALARS[kind]
        return from_json(contents)
    items = decode(contents, tensor)
    if kind == "sparse_coo":
        indices, values, shape, coalesced = items
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced or None, check_invariants=True)
    if kind in _LISTS:
        return _LISTS[kind](items)
    decoded: Any = _MAPS[kind]()
    for key, item in items:
        decoded[key] = item
    if "attributes" in value:
        vars(decoded).update(decode(value["attributes"], tensor))
    return decoded


def identity(tensor: Tensor) -> object:
    """Return a key that two tensors share if they are the same view of the same memory, which a checkpoint has once."""
    if isinstance(tensor, DTensor):
        # Not to_local(), which returns a new tensor each time: the id() of one could be that of another one later.
        return tensor.shape, tensor.placements, identity(tensor._local_tensor)
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda") or not tensor.numel():
        return id(tensor)
    view = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return *view, tensor.is_conj(), tensor.is_neg()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a checkpoint can hold a tensor: strided or sparse COO, with data, not quantized, no subclass."""
    has_layout = (tensor.layout is torch.strided and not tensor.is_nested) or tensor.layout is torch.sparse_coo
    return has_layout and not tensor.is_meta and not tensor.is_quantized and type(tensor.detach()) is Tensor


def _free_name(name: str, taken: dict[str, Tensor]) -> str:
    """Return a name under which no tensor is stored yet: `name`, or `name` with the lowest free number appended.

    >>> _free_name("model/1", {"model/1": torch.zeros(1)})
    'model/1#2'
    """
    number, candidate = 1, name
    while candidate in taken:  # keys of a dict can have the same text, as 1 and "1"
        number += 1
        candidate = f"{name}#{number}"
    return candidate
