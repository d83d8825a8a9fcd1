"""A schedule, or a controller, that hands over to another controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import MAX_INT, check_int
from variable_batch_size.adaptive.base import (
    ControlInput,
    Controller,
    check_controller,
    check_rule_of,
    needs_throughput,
)
from variable_batch_size.rules.base import Rule, needs_noise
from variable_batch_size.trace.batch_trace import BatchTrace


@final
@dataclass(frozen=True, slots=True)
class After:
    """Controller that asks `first` until so many samples have been used, and `then` from there on.

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
