"""The keyword arguments of `CustomOptimizer`, and the checked ones of an update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypedDict, get_args

from torch.distributed import ProcessGroup
from torch.nn import Module

from variable_batch_size._validation import check_number, value_error
from variable_batch_size.backend import Backend
from variable_batch_size.tracker import Tracker

Reduction = Literal["mean", "sum"]
Estimator = Literal["microbatches", "differenced"]
NormLimit = float | Callable[[int], float]  # a norm, or a function from the batch size to one


class OptimizerOptions(TypedDict, total=False):
    """The keyword arguments of `CustomOptimizer` other than `rule`."""

    model: Module | None
    noise: Estimator | None
    reduction: Reduction
    max_grad_norm: float | None
    skip_grad_norm: NormLimit | None
    find_unused_parameters: bool
    grad_norm: bool
    log_steps: int | None
    log_samples: int | None
    tracker: Tracker | None
    sharded_accumulation: bool
    process_group: ProcessGroup | None
    backend: Backend | None


class UpdateOptions(NamedTuple):
    """The arguments of `CustomOptimizer` that concern an update."""

    noise: Estimator | None = None
    reduction: Reduction = "mean"
    max_grad_norm: float | None = None
    find_unused_parameters: bool = False
    grad_norm: bool = False
    skip_grad_norm: NormLimit | None = None

    @property
    def measures_norm(self) -> bool:
        """Whether the norm of the reduced gradient is measured in each update."""
        return self.grad_norm or self.max_grad_norm is not None or self.skip_grad_norm is not None

    def validate(self) -> UpdateOptions:
        """Return the options with their numbers as floats; raise ValueError or TypeError if one is not allowed."""
        if self.reduction not in get_args(Reduction):
            raise value_error('reduction must be "mean" or "sum"', repr(self.reduction), "pass what the loss does")
        if self.noise is not None and self.noise not in get_args(Estimator):
            requirement = 'noise must be "microbatches" or "differenced"'
            raise value_error(requirement, f"{self.noise!r:.60}", "pass one, or omit it")
        skip_grad_norm = self.skip_grad_norm
        if skip_grad_norm is not None and not callable(skip_grad_norm):
            skip_grad_norm = check_norm(skip_grad_norm, "skip_grad_norm", "pass one, or a function of the batch size")
        return self._replace(
            max_grad_norm=None
            if self.max_grad_norm is None
            else check_norm(self.max_grad_norm, "max_grad_norm", "omit it for no clipping"),
            skip_grad_norm=skip_grad_norm,
        )


def check_objects(tracker: object, backend: object) -> None:
    """Raise TypeError unless `tracker` is a Tracker and `backend` a Backend, or None."""
    kinds: tuple[tuple[str, object, type], ...] = ("tracker", tracker, Tracker), ("backend", backend, Backend)
    for name, value, kind in kinds:
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be a vbs.{kind.__name__}, got {value!r:.60}; pass one, or omit it")


def check_norm(value: object, name: str, remedy: str) -> float:
    """Return a limit on a norm as a float > 0, after a check; infinity, the common idiom for no limit, is allowed."""
    if isinstance(value, float) and value == math.inf:
        return value
    number = check_number(value, name, remedy)
    if number == 0:
        raise value_error(f"{name} must be a finite number > 0", number, remedy)
    return number
