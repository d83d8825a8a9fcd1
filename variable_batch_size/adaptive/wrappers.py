"""Controllers that change the answers of another one, or hand over to it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import MAX_INT, check_int, check_positive, value_error
from variable_batch_size.adaptive.base import (
    ControlInput,
    Controller,
    check_controller,
    check_rule_of,
    needs_throughput,
)
from variable_batch_size.rules.base import Rule, needs_noise
from variable_batch_size.trace.batch_trace import BatchTrace


@dataclass(frozen=True, slots=True)
class ControllerWrapper(ABC):
    """A controller that changes the answers of another one, `controller`; its subclasses add their arguments."""

    controller: Controller

    def __post_init__(self) -> None:
        check_controller(self.controller)

    @property
    def needs_noise(self) -> bool:
        """Whether the other controller uses the gradient noise."""
        return needs_noise(self.controller)

    @property
    def needs_throughput(self) -> bool:
        """Whether the other controller uses the time of an update."""
        return needs_throughput(self.controller)

    def check_rule(self, rule: Rule) -> None:
        """Raise ValueError if the batch sizes of the other controller are not for a learning-rate rule."""
        check_rule_of(self.controller, rule)

    def ask(self, input: ControlInput) -> int:
        """Return the batch size of the other controller.

        Raises:
            TypeError, ValueError: if that is not an integer in [1, 2**53].
        """
        return check_int(self.controller(input), "the batch size of the controller", 1, MAX_INT)

    @abstractmethod
    def __call__(self, input: ControlInput, /) -> int:
        """Return the batch size, from that of the other controller."""


@final
@dataclass(frozen=True, slots=True)
class Monotone(ControllerWrapper):
    """Controller that never goes below the present batch size: B' = max(B, controller(...)).

    Use when: the noise scale is expected to grow during the training, and its estimate fluctuates.
    Fails when: one estimate is much too large: the batch size never comes back; limit it with `bounds`.
    Source: none; `NormTest` does the same.

    >>> from variable_batch_size.adaptive import PerDevice
    >>> Monotone(PerDevice(64))(ControlInput(devices=2, batch_size=256))
    256

    Args:
        controller: chooses the batch size.

    Raises:
        TypeError: if that is no controller.
    """

    def __call__(self, input: ControlInput, /) -> int:
        """Return the batch size of the controller, or the present one if that is larger."""
        return max(self.ask(input), input.batch_size or 1)


@final
@dataclass(frozen=True, slots=True)
class Smoothed(ControllerWrapper):
    """Controller that goes a part of the way: B' = B^(1 - weight) * wanted^weight, wanted = controller(...).

    The geometric mean of the present batch size and the wanted one is rounded towards the latter, so that the wanted
    one is reached. Without a present batch size it is the wanted one.

    Use when: the estimate of the noise fluctuates by more than the batch size should.
    Fails when: the answers change at once for good reason, as when devices leave; or the controller compares with the
    present batch size itself, as `Goodput` does.
    Source: none.

    >>> from variable_batch_size.adaptive import ConstantBatch
    >>> Smoothed(ConstantBatch(1600), weight=0.5)(ControlInput(devices=1, batch_size=100))
    400

    Args:
        controller: chooses the wanted batch size.
        weight: the part of the way, in (0, 1].

    Raises:
        TypeError: if an argument has another type.
        ValueError: if the weight is not in its range.
    """

    weight: float

    def __post_init__(self) -> None:
        ControllerWrapper.__post_init__(self)  # super() does not find a class with slots
        weight = check_positive(self.weight, "weight", "pass a number in (0, 1]")
        if weight > 1:
            raise value_error("weight must be <= 1", weight, "pass a number in (0, 1]")
        object.__setattr__(self, "weight", weight)

    def __call__(self, input: ControlInput, /) -> int:
        """Return the geometric mean, at least one sample closer to the wanted batch size."""
        wanted, present = self.ask(input), input.batch_size
        if present is None:
            return wanted
        mean: float = present * (wanted / present) ** self.weight
        if wanted > present:
            return min(max(math.ceil(mean), present + 1), wanted)
        return max(min(math.floor(mean), present - 1), wanted)


@final
@dataclass(frozen=True, slots=True)
class After:
    """Controller that asks `first` until this number of samples is used, and `then` from there on.

    A batch trace is read at the number of updates so far, so it is followed as closely as the controller is asked.

    Use when: the noise says little at the beginning, or a controller is for what follows a warm-up.
    Fails when: the controller is asked seldom: the handover comes with the first question after it.
    Source: none; a batch size that grows at first is the warm-up of Merrill et al. 2025, arXiv 2505.23971.

    >>> from variable_batch_size.adaptive import ConstantBatch, PerDevice
    >>> controller = After(10_000, first=ConstantBatch(64), then=PerDevice(32))
    >>> [controller(ControlInput(devices=8, samples=samples)) for samples in (9_999, 10_000)]
    [64, 256]

    Args:
        samples: number of samples after which `then` takes over, in [0, 2**53].
        first: a `BatchTrace`, or a controller.
        then: a controller.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if `samples` is not in its range.
    """

    samples: int
    first: BatchTrace | Controller
    then: Controller

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", check_int(self.samples, "samples", 0, MAX_INT))
        if not isinstance(self.first, BatchTrace):
            check_controller(self.first, "first, if it is no BatchTrace,")
        check_controller(self.then, "then")

    @property
    def needs_noise(self) -> bool:
        """Whether one of the two uses the gradient noise."""
        return needs_noise(self.first) or needs_noise(self.then)

    @property
    def needs_throughput(self) -> bool:
        """Whether one of the two uses the time of an update."""
        return needs_throughput(self.first) or needs_throughput(self.then)

    def check_rule(self, rule: Rule) -> None:
        """Raise ValueError if the batch sizes of one of the two are not for a learning-rate rule."""
        check_rule_of(self.first, rule)
        check_rule_of(self.then, rule)

    def __call__(self, input: ControlInput, /) -> int:
        """Return the batch size of the one whose turn it is.

        Raises:
            TraceEndError: if a batch trace with `on_end` "error" or "stop" ends before.
        """
        if input.samples >= self.samples:
            return self.then(input)
        return self.first.batch_size(input.updates) if isinstance(self.first, BatchTrace) else self.first(input)
