"""A batch trace that a controller writes while the training runs: when it is asked, and what its answers mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

from variable_batch_size._validation import MAX_INT, check_bounds, check_int, value_error
from variable_batch_size.adaptive.base import ControlInput, Controller, check_controller, describe_controller
from variable_batch_size.rules.base import needs_noise


@final
@dataclass(frozen=True, slots=True)
class AdaptiveTrace:
    """A batch trace in which a controller chooses the batch size.

    Pass it as `trace` to `CustomSampler`, or to `simulate` in the place of a controller. The controller is asked at the
    beginning, and after each update t that is a multiple of `every`. Its answer, rounded to a multiple of `multiple_of`
    and limited to `bounds`, is the batch size from update t + `delay` on, so that the microbatches that a loader has
    already read keep their batch size. During training, rank 0 asks the controller and sends the answer to the other
    ranks. At the beginning and after a restart, each rank asks it.

    A run that restarts with the same number of ranks makes the same decisions as if it had not stopped. With a
    different number of ranks, or a different controller, the controller is asked again for the decisions that are in
    effect or pending. If the batch size in effect changes, it changes at the first update after the restart.

    Source: Qiao et al. 2021, arXiv 2008.12260, section 3, in which training also adapts its batch size.

    >>> from variable_batch_size.adaptive import PerDevice
    >>> AdaptiveTrace(PerDevice(60), multiple_of=32).next(ControlInput(devices=3))
    192

    Args:
        controller: chooses the batch size.
        start: batch size before the first answer, in samples; by default, the first answer counts at once.
        bounds: least and largest batch size, in samples; by default 1 and the size of the dataset.
        multiple_of: each batch size is a multiple of this number of samples; a controller that moves by less than half
            of it stays where it is.
        every: number of updates between two questions; None: the controller is asked only at the beginning, and when
            the number of ranks has changed.
        delay: number of updates from a question to the first update with its answer; for training, more than 3 plus the
            number of updates that the loader reads ahead.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if a number is not in its range, or no multiple is within the bounds.
    """

    controller: Controller
    start: int | None = None
    bounds: tuple[int, int] | None = None
    multiple_of: int = 1
    every: int | None = 50
    delay: int = 16

    def __post_init__(self) -> None:
        """Check the arguments, and that a multiple of `multiple_of` lies within the bounds."""
        check_controller(self.controller)
        if self.bounds is not None:
            object.__setattr__(self, "bounds", check_bounds(self.bounds))
        object.__setattr__(self, "multiple_of", check_int(self.multiple_of, "multiple_of", 1, MAX_INT))
        low, high = self._limits
        if low > high:
            requirement = f"the bounds must include a multiple of multiple_of={self.multiple_of}"
            raise value_error(requirement, self.bounds, "change one of them")
        if self.start is not None:
            start = check_int(self.start, "start", low, high, "pass an integer within the bounds")
            object.__setattr__(self, "start", start)
            if self.start % self.multiple_of:
                requirement = f"start must be a multiple of multiple_of={self.multiple_of}"
                raise value_error(requirement, self.start, f"pass {round_to_allowed(self, self.start)}")
        if self.every is not None:
            object.__setattr__(self, "every", check_int(self.every, "every", 1, MAX_INT))
        object.__setattr__(self, "delay", check_int(self.delay, "delay", 0, MAX_INT))

    @property
    def _limits(self) -> tuple[int, int]:
        """The least and the largest multiple of `multiple_of` within the bounds."""
        low, high = self.bounds or (1, MAX_INT)
        return -(-low // self.multiple_of) * self.multiple_of, high // self.multiple_of * self.multiple_of

    @property
    def needs_noise(self) -> bool:
        """Whether the controller uses the gradient noise."""
        return needs_noise(self.controller)

    def next(self, input: ControlInput) -> int:
        """Ask the controller, and return its answer as a batch size: a multiple of `multiple_of`, within the bounds.

        Raises:
            TypeError, ValueError: if the answer is not an integer in [1, 2**53].
        """
        try:
            answer = self.controller(input)
        except (AttributeError, ValueError) as error:
            explained = _explain_error(error, self.controller, input)
            if explained is None:
                raise
            raise explained from error
        return round_to_allowed(self, check_int(answer, "the batch size of the controller", 1, MAX_INT))


def round_to_allowed(trace: AdaptiveTrace, size: int) -> int:
    """Return the batch size nearest to `size` that a trace may have: a multiple of `multiple_of`, within the bounds."""
    (low, high), multiple = trace._limits, trace.multiple_of
    nearest_multiple = (size + multiple // 2) // multiple * multiple
    return min(max(nearest_multiple, low), high)


def largest_size(trace: AdaptiveTrace) -> int:
    """Return the largest batch size that a trace may have."""
    return trace._limits[1]


def limit_to_dataset(trace: AdaptiveTrace, dataset_size: int) -> AdaptiveTrace:
    """Return an adaptive trace whose batch sizes are at most the dataset's size, because a batch is a part of an epoch.

    Args:
        trace: the trace; without bounds it gets the dataset's size as upper bound.
        dataset_size: number of samples.

    Raises:
        ValueError: if the upper bound, `start` or `multiple_of` of the trace exceeds it.
    """
    if trace.bounds is None:
        for value, name in (trace.multiple_of, "multiple_of"), (trace.start or 1, "start"):
            if value > dataset_size:
                requirement = f"{name} must be at most the dataset's size of {dataset_size} samples"
                raise value_error(requirement, value, "lower it, or use a larger dataset")
        return replace(trace, bounds=(1, dataset_size))
    if largest_size(trace) > dataset_size:
        requirement = f"the upper one of bounds must be at most the dataset's size of {dataset_size} samples"
        raise value_error(requirement, trace.bounds[1], "lower it, or use a larger dataset")
    return trace


def _explain_error(error: AttributeError | ValueError, controller: object, input: ControlInput) -> Exception | None:
    """Return an error that says which input the controller has used although it is unknown; None for other errors.

    Args:
        error: what the controller has raised.
        controller: the controller.
        input: what it got.
    """
    name = describe_controller(controller)
    if isinstance(error, AttributeError):
        unknown = [part for part in ("noise", "throughput") if getattr(input, part) is None]
        if error.obj is None and unknown:  # the controller has read None.sigma2, for example
            requirement = f"{name} must say what it reads, by needs_noise = True and needs_throughput = True"
            found = f"None as {' and '.join(unknown)} ({error})"
            return AttributeError(f"{requirement}, got {found}; add what it reads to its class, or to the function")
    elif input.noise is not None and math.isnan(input.noise.sigma2) and "NaN" in str(error):  # int(nan)
        requirement = f"{name} must also return a batch size before the first estimate of the noise, when it is nan"
        return value_error(requirement, error, "return input.batch_size, or a first size, if it is")
    return None
