"""Make each Python number in the step of an optimizer an input of its own in the graph.

PyTorch/XLA makes one input of all equal numbers in a graph. The graph would be another one in an update where the
learning rates of two parameter groups are equal, or a learning rate equals any other number of the step. Here numbers
are replaced by tensors. Each parameter group has one for each of the numbers that the step uses for a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

# The names of torch's functions, without underscores: "add" is also add_ and __add__, "iadd" is __iadd__.
_BINARY = frozenset(prefix + name for name in ("add", "sub", "mul", "div", "truediv") for prefix in ("", "i", "r"))
_WITH_VALUE = frozenset(("addcmul", "addcdiv"))


@final
class NumbersAsInputs(TorchFunctionMode):
    """A context for the steps of an optimizer, in which numbers are inputs of the graph, each of its own.

    These are the numbers in sums, products and quotients, and in `addcmul`, `addcdiv` and `lerp`: all that change from
    one step to the next in the optimizers of torch, except in their `foreach` implementations.

    Args:
        inner: the optimizer.
        send: returns a number as a 0-D tensor that fits another tensor.
        device_type: type of the devices that compile graphs.
    """

    def __init__(self, inner: Optimizer, send: Callable[[float, Tensor], Tensor], device_type: str = "xla") -> None:
        super().__init__()
        self._inner, self._send, self._device_type = inner, send, device_type
        self._owners: dict[int, tuple[int, int]] = {}  # id of a tensor -> group and parameter to which it belongs
        self._owner = (0, 0)  # of the last tensor that belongs to one
        self._position = 0  # how many numbers were used for that parameter
        self._sent: dict[tuple[int, int, torch.dtype], tuple[float, Tensor]] = {}  # by group, position and dtype

    def __enter__(self) -> NumbersAsInputs:
        """Enter the context for one step."""
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
        """Call a function of torch, with tensors instead of numbers."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if len(args) == 2 and name in _BINARY and self._compiles(args[0]):
            other = self._input(args[1], args)
            if "alpha" in kwargs:
                other = other * self._input(kwargs.pop("alpha"), args)
            args = args[0], other
        elif len(args) == 3 and name in _WITH_VALUE and "value" in kwargs and self._compiles(args[0]):
            args = args[0], args[1] * self._input(kwargs.pop("value"), args), args[2]
        elif len(args) == 3 and name == "lerp" and self._compiles(args[0]):
            weight = self._input(args[2], args)
            args = args[0], args[1], weight.to(args[0].dtype) if isinstance(weight, Tensor) else weight
        return func(*args, **kwargs)

    def _compiles(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.device.type == self._device_type and tensor.is_floating_point()

    def _input(self, value: Any, args: tuple[Any, ...]) -> Any:
        """Return a number as a tensor that fits the first one of `args`; anything else as it is."""
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return value
        owner = next((self._owners[id(arg)] for arg in args if id(arg) in self._owners), self._owner)
        if owner != self._owner:
            self._owner, self._position = owner, 0
        key = (owner[0], self._position, args[0].dtype)
        self._position += 1
        if key not in self._sent or self._sent[key][0] != value:
            self._sent[key] = (value, self._send(value, args[0]))
        return self._sent[key][1]
