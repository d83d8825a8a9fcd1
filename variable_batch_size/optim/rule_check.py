"""Ask rules and controllers whether they can be used in a training, and with one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.optim import ASGD, Optimizer, Rprop

from variable_batch_size.adaptive.base import check_rule_of
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.loop import check_sampler
from variable_batch_size.rules import ConstantRule, Rule, RuleContext
from variable_batch_size.rules.base import check_reference
from variable_batch_size.rules.selection import rules_for_groups


class Chosen(NamedTuple):
    """The rules of an optimizer."""

    rules: tuple[Rule, ...]  # by parameter group
    reference: int | None  # batch size, in samples
    per_group: bool  # whether the user has passed one for each group


def chosen(rule: Any, inner: Optimizer, ref_batchsize: int | None, sampler: CustomSampler) -> Chosen:
    """Return the rules that a user has chosen, see `CustomOptimizer`, after a check that they can be used.

    Raises:
        TypeError: if one cannot be used with the optimizer.
        ValueError: if a name is unknown, or a rule needs a `ref_batchsize` and there is none.
    """
    rule = "constant" if rule is None else rule
    rules = rules_for_groups(rule, len(inner.param_groups))
    reference = [check_reference(one, ref_batchsize) for one in rules][0]  # noqa: RUF015 (checks all of them)
    per_group = isinstance(rule, Sequence) and not isinstance(rule, str)
    check_sampler(sampler)
    _check_rules(rule if per_group else [rule] * len(rules), rules, inner, reference, sampler)
    return Chosen(rules, reference, per_group)


def check_applies_lr(inner: Optimizer, rules: Sequence[Rule]) -> None:
    """Check that a factor on lr in an update has its effect in this update.

    Raises:
        TypeError: if a rule scales the learning rate of an optimizer that does not apply it so.
    """
    scaling = [rule for rule in rules if not isinstance(rule, ConstantRule)]
    reads = {Rprop: "reads it in its first step only", ASGD: "applies it in the next step"}
    for kind, when in reads.items():
        if scaling and isinstance(inner, kind):
            raise TypeError(
                f"a rule that scales the learning rate needs an optimizer that applies it in the same step, but "
                f"{type(inner).__name__} {when}; use the constant rule, or another optimizer"
            )


def _check_rules(
    names: Sequence[object], rules: Sequence[Rule], inner: Optimizer, reference: int | None, sampler: CustomSampler
) -> None:
    """Call the `check` of each rule that was chosen by its name, with the parameter groups that it scales.

    A controller that chooses the batch sizes is asked, too, whether they are for these rules.
    """
    if (decided := sampler._feed.plans.decided) is not None:
        for rule in rules:
            check_rule_of(decided.adaptive.controller, rule)
    for rule in {id(rule): rule for rule, name in zip(rules, names, strict=True) if isinstance(name, str)}.values():
        check: Any = getattr(rule, "check", None)
        if callable(check):
            groups = [group for group, own in zip(inner.param_groups, rules, strict=True) if own is rule]
            context = RuleContext(
                optimizer=tuple(base.__name__ for base in type(inner).__mro__),
                groups=tuple({name: value for name, value in group.items() if name != "params"} for group in groups),
                ref_batchsize=reference,
                max_batch_size=sampler.max_batch_size,
            )
            check(context)
