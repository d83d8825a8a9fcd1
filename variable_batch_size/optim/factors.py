"""Call the rules, and check what they return."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.rules import Noise, Rule, RuleInput, Scaling
from variable_batch_size.rules.base import Factor

_MAY_STAY_ON_DEVICE = ("lr", "gradient", "progress")


def scalings_of_groups(rules: Sequence[Rule], update: RuleInput, device: torch.device | None = None) -> list[Scaling]:
    """Return the scaling of each parameter group, with floats for factors.

    Args:
        rules: the rule of each group; several groups may share one, which is called once.
        update: the input of the rules.
        device: a device on which factors on lr and on the gradient, and the progress, may stay as 0-D tensors, because
            the host does not read the noise there. Tensors are read otherwise.

    Raises:
        AttributeError: if a rule reads the noise, which is not measured.
        TypeError: if a rule returns anything but a `Scaling` of numbers.
        ValueError: if a factor is not finite.
    """
    by_rule: dict[int, Scaling] = {}
    for rule in rules:
        if id(rule) not in by_rule:
            by_rule[id(rule)] = _checked(rule, _called(rule, update), device)
    return [by_rule[id(rule)] for rule in rules]


def _called(rule: Rule, update: RuleInput) -> Any:
    try:
        return rule(update)
    except AttributeError as error:
        if update.noise is None and error.obj is None and hasattr(Noise, error.name or ""):
            raise AttributeError(
                f"a rule that reads the noise must have needs_noise = True in its class, but {rule} reads "
                f'noise.{error.name} and has not; add it, or pass noise="microbatches" to the optimizer',
                name=error.name,
                obj=None,
            ) from error
        raise


def _checked(rule: Rule, scaling: Any, device: torch.device | None) -> Scaling:
    if not isinstance(scaling, Scaling):
        raise type_error(f"a rule must return a vbs.Scaling, but {rule} did not", scaling, "return Scaling(lr=factor)")
    factors: dict[str, Any] = {field.name: getattr(scaling, field.name) for field in fields(scaling)}
    return replace(scaling, **{name: _factor(rule, name, value, device) for name, value in factors.items()})


def _factor(rule: Rule, name: str, value: Any, device: torch.device | None) -> Factor:
    if type(value) is float and math.isfinite(value):  # the ordinary case
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        if value.device == device:
            if name in _MAY_STAY_ON_DEVICE:
                return value.detach().reshape(())
            raise TypeError(
                f"on {value.device.type} the factor {name} must be a number that does not depend on the noise, which "
                f"the host does not read there, but {rule} returned a tensor; use the noise for lr, gradient and "
                f"progress only"
            )
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise type_error(
            f"every factor of a rule must be a number, but {rule} returned {name}", value, "return a float"
        )
    if not math.isfinite(value):
        raise value_error(
            "every factor of a rule must be finite",
            f"{name}={float(value)} from {rule}",
            "return 1 if a factor is unknown, as before the first estimate of the noise",
        )
    return float(value)
