"""Choose the rules of an optimizer, call them, and check whether they and what they return can be used."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import ASGD, Optimizer, Rprop

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.optim.wrapper import check_sampler
from variable_batch_size.rules import ConstantRule, Noise, Rule, RuleContext, RuleInput, Scaling
from variable_batch_size.rules.base import Factor, check_reference
from variable_batch_size.rules.selection import rules_for_groups


class Chosen(NamedTuple):
    """The rules of an optimizer."""

    rules: tuple[Rule, ...]  # by parameter group
    reference: int | None  # batch size, in samples
    per_group: bool  # whether the user has passed one for each group


def choose_rules(rule: Any, inner: Optimizer, ref_batchsize: int | None, sampler: Dealer) -> Chosen:
    """Return the learning-rate rule of each parameter group, after a check that they can be used.

    Args:
        rule: a rule, its name, or a list with one for each parameter group. None: the constant rule.
        inner: the optimizer whose learning rates are scaled.
        ref_batchsize: the batch size at which they were tuned, in samples, or None if the user has given none.
        sampler: what deals the microbatches.
    """
    rule = "constant" if rule is None else rule
    rules = rules_for_groups(rule, len(inner.param_groups))
    reference = [check_reference(chosen, ref_batchsize) for chosen in rules][0]  # noqa: RUF015 (checks all of them)
    per_group = isinstance(rule, Sequence) and not isinstance(rule, str)  # whether the user has passed a list
    check_sampler(sampler)
    _check_rules(rule if per_group else [rule] * len(rules), rules, inner, reference, sampler)
    return Chosen(rules, reference, per_group)


def check_applies_lr(inner: Optimizer, rules: Sequence[Rule]) -> None:
    """Raise TypeError if a rule scales the learning rate, but the optimizer would not apply it in the same update."""
    uses = {Rprop: "reads it in its first step only", ASGD: "applies it in the next step"}
    reasons = [use for kind, use in uses.items() if isinstance(inner, kind)]
    if any({"lr_max", "weight_sum"} <= group.keys() for group in inner.param_groups):  # schedule-free
        reasons.append("weighs all later ones by the largest that it has seen")
    if reasons and not all(isinstance(rule, ConstantRule) for rule in rules):
        raise TypeError(
            f"a rule that scales the learning rate needs an optimizer that applies it in the same step, but "
            f"{type(inner).__name__} {reasons[0]}; use the constant rule, or another optimizer"
        )


def _check_rules(
    names: Sequence[object], rules: Sequence[Rule], inner: Optimizer, reference: int | None, sampler: Dealer
) -> None:
    """Let each rule that the user has chosen by its name check that it suits the optimizer, if it has a `check`.

    `names` and `rules` have an entry for each parameter group: what the user has passed, and the rule.
    """
    # By identity, because groups may share a rule, which is checked once.
    named = {id(rule): rule for rule, name in zip(rules, names, strict=True) if isinstance(name, str)}
    for rule in named.values():
        check: Any = getattr(rule, "check", None)
        if callable(check):
            groups = [group for group, chosen in zip(inner.param_groups, rules, strict=True) if chosen is rule]
            context = RuleContext(
                optimizer=tuple(base.__name__ for base in type(inner).__mro__),
                groups=tuple({name: value for name, value in group.items() if name != "params"} for group in groups),
                ref_batchsize=reference,
                max_batch_size=sampler.max_batch_size,
            )
            check(context)


_MAY_STAY_ON_DEVICE = ("lr", "gradient", "progress")


def scalings_of_groups(rules: Sequence[Rule], update: RuleInput, device: torch.device | None = None) -> list[Scaling]:
    """Call the rules for an update, and return the scaling of each parameter group, with floats for factors.

    Args:
        rules: the rule of each parameter group, where one that several groups share is called once.
        update: what the rules read: the batch size, and the noise if it is measured.
        device: where the factors on lr and on the gradient, and the progress, may stay 0-D tensors, because the host
            does not read the noise there. Other tensors become floats.
    """
    by_rule: dict[int, Scaling] = {}  # by the id of the rule
    for rule in rules:
        if id(rule) not in by_rule:
            by_rule[id(rule)] = _checked_scaling(rule, _call_rule(rule, update), device)
    return [by_rule[id(rule)] for rule in rules]


def _call_rule(rule: Rule, update: RuleInput) -> Any:
    """Call a rule, and add a remedy to the AttributeError of one that reads noise which is not measured."""
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


def _checked_scaling(rule: Rule, scaling: Any, device: torch.device | None) -> Scaling:
    """Return the scaling that a rule has returned, with finite factors; raise an error if they cannot be used.

    `device`: where some factors may stay 0-D tensors; all other factors become floats.
    """
    if not isinstance(scaling, Scaling):
        raise type_error(
            f"a rule must return a vbs.rules.Scaling, but {rule} did not", scaling, "return Scaling(lr=factor)"
        )
    factors: dict[str, Any] = {field.name: getattr(scaling, field.name) for field in fields(scaling)}
    if all(type(value) is float and math.isfinite(value) for value in factors.values()):  # the ordinary case
        return scaling
    return replace(scaling, **{name: _checked_factor(rule, name, value, device) for name, value in factors.items()})


def _checked_factor(rule: Rule, name: str, value: Any, device: torch.device | None) -> Factor:
    """Return a factor as a finite float, or as a 0-D tensor where it may stay on `device`."""
    if isinstance(value, Tensor) and value.numel() == 1:
        if value.device == device:
            if name in _MAY_STAY_ON_DEVICE:
                return value.detach().reshape(())
            raise TypeError(
                f"on {value.device.type} the factor {name} must not depend on the noise, which the host does not read, "
                f"but {rule} returned a tensor; use the noise for lr, gradient and progress only"
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
