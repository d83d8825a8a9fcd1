"""Load the state of an optimizer so that its `state_dict()` is again what was saved: names, dtypes, bits.

`torch.optim.Optimizer.load_state_dict` casts floating-point tensors to the dtype of their parameter, and so rounds a
float32 master or moment of a bfloat16 parameter for the rest of the training.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from variable_batch_size.checkpoint.tensor_file import bytes_of


def keeps_dtypes(inner: Optimizer) -> bool:
    """Return whether `restore_dtypes` knows how this kind of optimizer loads a state: as torch does."""
    return type(inner).load_state_dict is Optimizer.load_state_dict


def restore_dtypes(inner: Optimizer, saved: Mapping[str, Any], dtypes: Sequence[torch.dtype]) -> None:
    """Give the state that an optimizer has just loaded the saved dtypes and bits again.

    A tensor that had the dtype of its parameter has that of the parameter here, as torch wants it.

    Args:
        inner: the optimizer.
        saved: the state that it has loaded.
        dtypes: those that its parameters had when it was saved, in the order of its groups.
    """
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    for key, parameter, dtype in zip(keys, parameters, dtypes, strict=True):
        state = inner.state.get(parameter, {})
        for name, value in saved["state"].get(key, {}).items():
            if name in state:  # else __setstate__() of its class has another one
                state[name] = _as_saved(state[name], value, dtype)


def _as_saved(loaded: Any, saved: Any, dtype: torch.dtype) -> Any:
    """Return a loaded value as it was saved; `dtype` is that of the saved parameter."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return loaded if saved.dtype in (loaded.dtype, dtype) else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return type(saved)({key: _as_saved(loaded.get(key), value, dtype) for key, value in saved.items()})
    if type(saved) is type(loaded) and isinstance(saved, (list, tuple)):
        return type(saved)([_as_saved(*pair, dtype) for pair in zip(loaded, saved, strict=True)])
    return saved if isinstance(saved, (str, set, frozenset)) else loaded  # torch makes the text of a generator of texts


def check_reload(inner: Optimizer, known: set[object]) -> None:
    """Load the states of parameters into a copy of an optimizer that is not torch's, and compare them.

    Of each group it takes one state of each kind, by names, types and dtypes, that is not `known` yet.

    What cannot be tried so, such as an optimizer whose attributes cannot be copied, is not checked.

    Raises:
        TypeError: if another state comes back.
    """
    if type(inner).__module__.startswith("torch.optim."):
        return
    for parameter, state, group in _samples(inner, known):
        try:
            clone = _clone(inner, {**group, "params": [parameter]})
            one = {"state": {0: copy.deepcopy(state)}, "param_groups": [{**group, "params": [0]}]}
            clone.load_state_dict(one)
            if keeps_dtypes(clone):
                restore_dtypes(clone, one, [parameter.dtype])
            again = clone.state_dict()["state"][0]
        except Exception:  # of a copy that lacks what this class needs
            continue
        if difference := _difference(state, again):
            raise TypeError(
                f"load_state_dict() of {type(inner).__name__} must give back the state that was saved, but "
                f"{difference}; let it inherit that of torch.optim.Optimizer, whose dtypes a checkpoint restores"
            )


def _samples(inner: Optimizer, known: set[object]) -> Iterator[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
    """Yield the parameters with a kind of state that is not known, that state, and the group."""
    saved = inner.state_dict()
    for index, (group, packed) in enumerate(zip(inner.param_groups, saved["param_groups"], strict=True)):
        for parameter, number in zip(group["params"], packed["params"], strict=True):
            state = saved["state"].get(number)
            if state and (kind := (id(inner), index, parameter.dtype, _kind(state))) not in known:
                yield parameter, state, {**group, "params": []}
                known.add(kind)  # unless it was refused


def _kind(value: Any) -> object:
    """Return the names, types and dtypes in a state."""
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.layout, value.dim(), value.is_conj(), value.is_neg()
    if isinstance(value, dict):
        return type(value), *((key, _kind(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), *map(_kind, value)
    return type(value), *({*map(type, value)} if isinstance(value, (set, frozenset)) else ())


def _clone(inner: Optimizer, group: dict[str, Any]) -> Optimizer:
    """Return an optimizer of the same class for one group, which shares nothing else that could be changed."""
    clone: Optimizer = object.__new__(type(inner))
    shared = {id(tensor): tensor for each in inner.param_groups for tensor in each["params"]}
    left_out = "state", "param_groups", "step", "add_param_group"
    own = {
        name: value
        for name, value in vars(inner).items()
        if name not in left_out and not name.startswith("_optimizer_")  # hooks
    }
    clone.__dict__.update(copy.deepcopy(own, shared))
    clone.__setstate__({"state": defaultdict(dict), "param_groups": [group]})
    return clone


def _difference(saved: Any, again: Any, where: str = "") -> str:
    """Return in words how two states of a parameter differ; "" if they do not."""
    if isinstance(saved, Tensor) and isinstance(again, Tensor):
        for found, expected in ((again.dtype, saved.dtype), (again.layout, saved.layout)):
            if found != expected:
                return f"{where} was {expected} and is {found}"
        return "" if _bytes(saved) == _bytes(again) else f"{where} has other values"
    if isinstance(saved, dict) and type(saved) is type(again) and saved.keys() == again.keys():
        pairs = [(value, again[key], f"{where}/{key}".lstrip("/")) for key, value in saved.items()]
    elif isinstance(saved, (list, tuple)) and type(saved) is type(again) and len(saved) == len(again):
        pairs = [(*pair, f"{where}/{number}") for number, pair in enumerate(zip(saved, again, strict=True))]
    elif isinstance(saved, (set, frozenset)):
        return "" if type(saved) is type(again) and saved == again else f"{where} is another one"
    else:
        return "" if repr(saved) == repr(again) else f"{where or 'it'} is another one"
    return next(filter(None, (_difference(*pair) for pair in pairs)), "")


def _bytes(tensor: Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.layout is torch.sparse_coo:
        return b"".join(map(_bytes, (local._indices(), local._values())))
    return bytes(bytes_of(local.detach().cpu().resolve_conj().resolve_neg().contiguous()))
