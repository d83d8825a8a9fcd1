"""Under which names a checkpoint has the states of models and optimizers, and how each tensor lies on the ranks.

The names are those of the model itself, whatever wraps it and its modules: DistributedDataParallel, `torch.compile`,
PyTorch/XLA's FSDPv2, activation checkpointing. The state of an optimizer is by these names, too; a parameter that is
not one of the model has its number in the optimizer.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from variable_batch_size.checkpoint.shards import placed_like
from variable_batch_size.checkpoint.tensor_file import bytes_of

State: TypeAlias = dict[str, Any]

_PARALLEL = (DataParallel, DistributedDataParallel)
# By torch.compile, by PyTorch/XLA's FSDPv2, by activation checkpointing.
_INSERTED = re.compile(r"(^|\.)(_orig_mod|_orig_module|_checkpoint_wrapped_module)(?=\.|$)")


@final
class Names:
    """The names in a checkpoint of what one model and its optimizers have."""

    def __init__(self, model: nn.Module) -> None:
        """Find the name of each parameter in the model itself, without what wrappers insert."""
        self.model = unwrapped(model)
        self._parameters = {
            id(parameter): _clean_name(name) for name, parameter in self.model.named_parameters(remove_duplicate=False)
        }

    def model_state(self) -> State:
        """Return the state dict of the model under the names that a checkpoint has: without what wrappers insert."""
        state = self.model.state_dict()
        named = OrderedDict((_clean_name(name), value) for name, value in state.items())
        if metadata := getattr(state, "_metadata", None):  # torch's private record of the version of each module
            named._metadata = OrderedDict((_clean_name(name), value) for name, value in metadata.items())  # type: ignore[attr-defined]
        return named

    def load_model(self, saved: Mapping[str, Any]) -> None:
        """Load a state dict that `model_state` has returned, perhaps of a model in other wrappers, into the model."""
        state_here = self.model.state_dict()
        state = OrderedDict((name, saved[_clean_name(name)]) for name in state_here)
        if metadata := getattr(saved, "_metadata", None):
            named = {name: metadata.get(_clean_name(name)) for name in getattr(state_here, "_metadata", {})}
            state._metadata = OrderedDict((name, version) for name, version in named.items() if version is not None)  # type: ignore[attr-defined]
        self.model.load_state_dict(state)

    def named_parameters(self, optimizer: Any) -> list[tuple[str | int, Tensor]]:
        """Return the parameters of an optimizer with their names, in the order of its groups.

        The name of a parameter that is not in the model is its number in the optimizer.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Reversed, so that a parameter which is there twice has its first number.
        numbers = {id(tensor): number for number, tensor in reversed([*enumerate(parameters)])}
        return [(self._parameters.get(id(tensor), numbers[id(tensor)]), tensor) for tensor in parameters]

    def optimizer_state(self, optimizer: Any) -> State:
        """Return the state of an optimizer by the names of its parameters, where torch has their numbers.

        A number would say nothing without the script that has created the optimizer.
        """
        state = optimizer.state_dict()
        named = self.named_parameters(optimizer)
        names = [name for name, _ in named]
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
        named_state = {}
        for key, entry in state["state"].items():
            if isinstance(key, int):
                named_state[names[key]] = {name: _as_parameter(value, named[key][1]) for name, value in entry.items()}
            else:  # an entry that is not of a parameter, but of the optimizer itself
                named_state[key] = entry
        return {**state, "state": named_state, "param_groups": groups}

    def check_groups(self, saved: Mapping[str, Any], optimizer: Any) -> None:
        """Check that an optimizer has the parameters of a saved state.

        Args:
            saved: what `optimizer_state` returned, or a `state_dict()` of torch, which has numbers in place of names.
            optimizer: the optimizer.

        Raises:
            ValueError: if it has others, or in another order.
        """
        names = [name for name, _ in self.named_parameters(optimizer)]
        first_parameter = 0
        for number, group in enumerate(saved["param_groups"]):
            next_first = first_parameter + len(group["params"])
            names_here, numbers = names[first_parameter:next_first], [*range(first_parameter, next_first)]
            first_parameter = next_first
            if group["params"] not in (names_here, numbers):
                raise ValueError(
                    f"the optimizer must have the parameters that were saved, in the same order, but group {number} "
                    f"has {_in_words(names_here)} in the place of {_in_words(group['params'])}; create the groups that "
                    f"were saved"
                )


def with_numbers(state: Mapping[str, Any]) -> State:
    """Return a state that `optimizer_state` returned, with numbers in place of names, as `load_state_dict` wants it."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    # Reversed, so that a parameter which is there twice has its first number.
    numbers = {name: number for number, name in reversed([*enumerate(names)])}
    return {
        **state,
        "state": {numbers.get(name, name): entry for name, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model within a compiled module, a DataParallel or a DistributedDataParallel."""
    while isinstance(model, _PARALLEL) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, _PARALLEL) else model._orig_mod  # type: ignore[assignment]
    return model


def _clean_name(name: str) -> str:
    """Return the name of a tensor without what wrappers of its modules have inserted."""
    return _INSERTED.sub("", name).removeprefix(".")


def _in_words(names: Sequence[str | int]) -> str:
    """Return the first three names, for a message; a number is that of a parameter which is not in the model."""
    words = ", ".join(f"parameter {name}" if isinstance(name, int) else name for name in names[:3]) or "none"
    return f"{words} ..." if len(names) > 3 else words


def _as_parameter(value: Any, parameter: Tensor) -> Any:
    """Return a value of an optimizer's state, with the placements of its parameter if it is sharded alike.

    With weight decay and tensor parallelism within FSDP2, torch 2.9 labels momentum with other placements than its
    memory has.
    """
    if isinstance(value, DTensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return placed_like(value.to_local(), parameter)
    return value


def weights_hash(model: nn.Module | Mapping[str, Any]) -> str:
    """Return the SHA-256 of the tensors of a model, in hexadecimal: two models with one hash are equal to the last bit.

    It covers the names, in their order, each with dtype, shape and bytes, and does not depend on the device.

    Args:
        model: a model that this process has whole, possibly compiled or in a DistributedDataParallel; or its state
            dict, such as one from `vbs.read_checkpoint`.

    >>> model = nn.Linear(2, 1)
    >>> weights_hash(model) == weights_hash(model.state_dict())
    True
    """
    state: Mapping[str, Any] = model if isinstance(model, Mapping) else unwrapped(model).state_dict()
    total = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        if isinstance(tensor, Tensor):
            total.update(f"{name} {tensor.dtype} {[*tensor.shape]}\n".encode())
            plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            total.update(bytes_of(plain))
    return total.hexdigest()
