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
    """Return whether an optimizer loads a state as torch does, so that `restore_dtypes` can undo the casts."""
    return type(inner).load_state_dict is Optimizer.load_state_dict


def restore_dtypes(inner: Optimizer, saved: Mapping[str, Any], dtypes: Sequence[torch.dtype]) -> None:
    """Replace tensors that an optimizer has cast while it loaded a state by the saved ones, to the last bit.

    A tensor that was saved in the dtype of its parameter stays in the dtype that the parameter has now, as torch casts
    it.

    Args:
        inner: the optimizer, which has loaded the state.
        saved: the state.
        dtypes: the dtypes that its parameters had when it was saved, in the order of its groups.
    """
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    for key, parameter, dtype in zip(keys, parameters, dtypes, strict=True):
        state = inner.state.get(parameter, {})
        for name, value in saved["state"].get(key, {}).items():
            if name in state:  # __setstate__() of the optimizer may have dropped or renamed an entry
                state[name] = _as_saved(state[name], value, dtype)


def _as_saved(loaded: Any, saved: Any, dtype: torch.dtype) -> Any:
    """Return a value of an optimizer's state as it was saved, if the optimizer has cast it in a load.

    Args:
        loaded: the value that the optimizer has now.
        saved: the value that was saved.
        dtype: the dtype of the saved parameter; a tensor that was saved in this dtype stays as it was loaded.
    """
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return loaded if saved.dtype in (loaded.dtype, dtype) else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return type(saved)({key: _as_saved(loaded.get(key), value, dtype) for key, value in saved.items()})
    if type(saved) is type(loaded) and isinstance(saved, (list, tuple)):
        return type(saved)([_as_saved(*pair, dtype) for pair in zip(loaded, saved, strict=True)])
    # torch's load_state_dict() rebuilds each iterable from a generator; a text becomes "<generator object ...".
    return saved if isinstance(saved, (str, set, frozenset)) else loaded


def check_reload(inner: Optimizer, known: set[object]) -> None:
    """Load states of parameters into a copy of an optimizer that is not torch's, and check that they come back equal.

    Otherwise a restored training would continue with another state than it had saved, and only its results would show.
    In each group it tries one state of each kind, which `_kind` defines. It does not check what cannot be tried in this
    way, such as an optimizer whose attributes cannot be copied.

    Args:
        inner: the optimizer.
        known: the kinds that were tried before, to which this call adds its own.

    Raises:
        TypeError: if another state comes back.
    """
    if type(inner).__module__.startswith("torch.optim."):
        return
    for parameter, state, group in _samples(inner, known):
        try:
            clone = _clone(inner, {**group, "params": [parameter]})
            state_dict = {"state": {0: copy.deepcopy(state)}, "param_groups": [{**group, "params": [0]}]}
            clone.load_state_dict(state_dict)
            if keeps_dtypes(clone):
                restore_dtypes(clone, state_dict, [parameter.dtype])
            again = clone.state_dict()["state"][0]
        except Exception:  # the copy lacks something that this class needs
            continue
        if difference := _difference(state, again):
            raise TypeError(
                f"load_state_dict() of {type(inner).__name__} must give back the state that was saved, but "
                f"{difference}; inherit the method of torch.optim.Optimizer, whose dtypes a checkpoint restores"
            )


def _samples(inner: Optimizer, known: set[object]) -> Iterator[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
    """Yield one parameter for each kind of optimizer state that was not tried before.

    A kind becomes known when the generator continues: not if the caller has raised an error for it.

    Args:
        inner: the optimizer.
        known: the kinds that were tried, to which this generator adds.

    Yields:
        The parameter, its state, and its group without parameters.
    """
    saved = inner.state_dict()
    for index, (group, saved_group) in enumerate(zip(inner.param_groups, saved["param_groups"], strict=True)):
        for parameter, number in zip(group["params"], saved_group["params"], strict=True):
            state = saved["state"].get(number)
            if not state:
                continue
            kind = id(inner), index, parameter.dtype, _kind(state)
            if kind not in known:
                yield parameter, state, {**group, "params": []}
                known.add(kind)


def _kind(value: Any) -> object:
    """Return what two states of parameters have in common if they are of one kind, as a hashable value.

    These are the names, types, dtypes and layouts in the state, and not its values.
    """
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.layout, value.dim(), value.is_conj(), value.is_neg()
    if isinstance(value, dict):
        return type(value), *((key, _kind(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), *map(_kind, value)
    if isinstance(value, (set, frozenset)):
        return type(value), *{*map(type, value)}  # each type once
    return (type(value),)


def _clone(inner: Optimizer, group: dict[str, Any]) -> Optimizer:
    """Return an optimizer of the same class with this one group, which shares only parameters with `inner`.

    `__init__` is not called, because its arguments are not known: the attributes are copied.
    """
    clone: Optimizer = object.__new__(type(inner))
    parameters = {id(tensor): tensor for each in inner.param_groups for tensor in each["params"]}
    left_out = "state", "param_groups", "step", "add_param_group"
    attributes = {
        name: value
        for name, value in vars(inner).items()
        if name not in left_out and not name.startswith("_optimizer_")  # hooks
    }
    # The second argument is the memo of deepcopy: objects that are in it are not copied.
    clone.__dict__.update(copy.deepcopy(attributes, parameters))
    clone.__setstate__({"state": defaultdict(dict), "param_groups": [group]})
    return clone


def _difference(saved: Any, again: Any, where: str = "") -> str:
    """Return in words how two states of a parameter differ; "" if they do not.

    Args:
        saved: the state that was loaded, or a value within it.
        again: the state after the load, or the value at the same place.
        where: the keys that lead to the value, joined by "/".
    """
    if isinstance(saved, Tensor) and isinstance(again, Tensor):
        for actual, expected in ((again.dtype, saved.dtype), (again.layout, saved.layout)):
            if actual != expected:
                return f"{where} was {expected} and is {actual}"
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
    """Return the bytes of the elements of a tensor that are on this rank."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.layout is torch.sparse_coo:
        return b"".join(map(_bytes, (local._indices(), local._values())))
    return bytes(bytes_of(local.detach().cpu().resolve_conj().resolve_neg().contiguous()))
