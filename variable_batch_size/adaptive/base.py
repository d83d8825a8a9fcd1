"""What a controller gets and returns, and what controllers share.

A controller is a function. In this package it is a frozen dataclass in a file of its own. Its docstring has the
equation and the lines "Use when:", "Fails when:" and "Source:". One that a string can name has a line in
`variable_batch_size.adaptive.table`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Protocol, final

from variable_batch_size._validation import MAX_INT, type_error, without_addresses
from variable_batch_size.adaptive.throughput import Throughput
from variable_batch_size.rules.base import Noise, Rule


@final
@dataclass(frozen=True, slots=True)
class ControlInput:
    """What a controller may use to choose the batch size of the next updates.

    Attributes:
        devices: number of devices that compute these updates, >= 1.
        batch_size: the batch size that was chosen last, in samples; a controller returns it to keep it. None if none
            was chosen. It does not become smaller when the end of an epoch shortens an update.
        minibatch_size: maximum number of rows of a microbatch; None if it is not known.
        updates: number of updates so far.
        samples: number of samples of all updates so far.
        progress: how far the training is, in updates at `ref_batchsize`.
        noise: the gradient noise, with the gain of an update of `batch_size`; None if it is not measured.
        throughput: the time of an update; None if it is not known.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows, see `CustomSampler`.
    """

    devices: int
    batch_size: int | None = None
    minibatch_size: int | None = None
    updates: int = 0
    samples: int = 0
    progress: float = 0.0
    noise: Noise | None = None
    throughput: Throughput | None = None
    fixed_shape: bool = False


class Controller(Protocol):
    """Chooses the global batch size: a pure function.

    A controller, which can also be a function, can have the attributes `needs_noise = True`, if it uses
    `ControlInput.noise`, and `needs_throughput = True`, if it uses `ControlInput.throughput` (default: False). Training
    measures the noise and the throughput only then. A controller can also have a method `check_rule(rule) -> None`,
    which raises an error if its batch sizes do not fit the learning-rate rule.
    """

    def __call__(self, input: ControlInput, /) -> int:
        """Return the number of samples of each of the next updates, >= 1."""
        ...


def needs_throughput(controller: object) -> bool:
    """Return whether a controller uses the time of an update."""
    return bool(getattr(controller, "needs_throughput", False))


def check_rule_of(controller: object, rule: Rule) -> None:
    """Raise ValueError if the batch sizes of a controller are not for a learning-rate rule, as far as it knows."""
    check = getattr(controller, "check_rule", None)
    if callable(check):
        check(rule)


def check_controller(value: object) -> None:
    """Raise TypeError unless `value` is a callable object: a function, or an instance of a controller's class."""
    if isinstance(value, type) or not callable(value):
        raise type_error("controller must be a callable object such as PerDevice(64)", value, "pass one")


def describe_controller(controller: object) -> str:
    """Return a text for a controller; ranks, and a run that resumes, compare it to find out whether it is the same.

    The text of a function has the values that it takes from the function around it.

    >>> def times(factor):
    ...     return lambda input: factor * input.devices
    >>> describe_controller(times(64))
    'times.<locals>.<lambda>(factor=64)'
    """
    if not isinstance(controller, FunctionType):
        return without_addresses(repr(controller))
    enclosed = inspect.getclosurevars(controller).nonlocals  # a recursive function has itself among them
    values = (f"{name}={describe_controller(value)}" for name, value in enclosed.items() if value is not controller)
    return f"{controller.__qualname__}({', '.join(values)})"


def as_samples(value: float, rounded: Callable[[float], int] = round) -> int:
    """Return a number other than nan as a batch size: an integer in [1, 2**53].

    Args:
        value: the number, which may be infinite.
        rounded: function that makes it an integer, such as `math.ceil`.

    >>> from math import ceil, inf
    >>> as_samples(0.2), as_samples(99.5, ceil), as_samples(inf) == 2**53
    (1, 100, True)
    """
    return rounded(min(max(value, 1), MAX_INT))
