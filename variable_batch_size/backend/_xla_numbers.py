"""Make each Python number in the step of an optimizer an input of its own in the graph.

PyTorch/XLA passes equal numbers of a graph as one input. The inputs, and with them the graph, would change in an update
where the learning rates of two parameter groups are equal, or a learning rate equals another number of the step. Here,
numbers are replaced by tensors: one for each number that the step uses per parameter, for each parameter group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

# The functions of torch whose numbers are replaced, without the underscores of their variants (`add_`, `__iadd__`).
_WITH_OTHER = frozenset(
    f"{prefix}{name}" for name in ("add", "sub", "mul", "div", "truediv") for prefix in ("", "r", "i")
)
_WITH_VALUE = frozenset(("addcmul", "addcdiv"))


@final
class NumbersAsInputs(TorchFunctionMode):
    """Within this context, the numbers with which an optimizer scales lazy tensors are inputs of their own.

    These are the numbers of additions, products, quotients, `addcmul`, `addcdiv` and `lerp`, which update the
    parameters in the optimizers of torch. Others are left to PyTorch/XLA.

    Args:
        inner: the optimizer that makes a step in this context.
        send: returns a number as a 0-D tensor that fits another tensor.
        device_type: type of the devices whose tensors are lazy.
    """

    def __init__(self, inner: Optimizer, send: Callable[[float, Tensor], Tensor], device_type: str = "xla") -> None:
        super().__init__()
        self._inner, self._send, self._device_type = inner, send, device_type
        self._owners: dict[int, tuple[int, int]] = {}  # id of a tensor -> group and parameter that it belongs to
        self._owner = (0, 0)  # of the last tensor that belongs to one
        self._position = 0  # how many numbers were used for that parameter
        self._sent: dict[tuple[int, int, torch.dtype], tuple[float, Tensor]] = {}  # by group, position and dtype

    def __enter__(self) -> NumbersAsInputs:
        """Enter the context, for one step."""
        self._owner, self._position = (0, 0), 0
        self._owners = {
            id(tensor): (number, index)
            for number, group in enumerate(self._inner.param_groups)
            for index, parameter in enumerate(group["params"])
            for tensor in (parameter, parameter.grad, *self._inner.state.get(parameter, {}).values())
            if isinstance(tensor, Tensor)
        }
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, with tensors instead of its numbers."""
        kwargs = kwargs or {}
        if args and _is_lazy(args[0], self._device_type):
            name = getattr(func, "__name__", "").strip("_")
            if name in _WITH_OTHER and len(args) == 2:
                other = self._tensor(args[1], args)
                if "alpha" in kwargs:
                    other = other * self._tensor(kwargs["alpha"], args)
                return func(args[0], other, **{key: value for key, value in kwargs.items() if key != "alpha"})
            if name in _WITH_VALUE and len(args) == 3 and kwargs.keys() == {"value"}:
                return func(args[0], args[1] * self._tensor(kwargs["value"], args), args[2])
            if name == "lerp" and len(args) == 3:
                return func(*args[:2], self._tensor(args[2], args), **kwargs)
        return func(*args, **kwargs)

    def _tensor(self, value: Any, args: tuple[Any, ...]) -> Any:
        """Return a number as a tensor that fits the first one of `args`; anything else as it is."""
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return value
        owner = next((self._owners[id(one)] for one in args if id(one) in self._owners), self._owner)
        if owner != self._owner:
            self._owner, self._position = owner, 0
        key = (owner[0], self._position, args[0].dtype)
        self._position += 1
        known = self._sent.get(key)
        if known is None or known[0] != value:
            known = self._sent[key] = (value, self._send(value, args[0]))
        return known[1]


def _is_lazy(tensor: Any, device_type: str) -> bool:
    return isinstance(tensor, Tensor) and tensor.device.type == device_type and tensor.is_floating_point()
