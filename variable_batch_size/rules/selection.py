"""From what a user passes as `rule` to one rule for each parameter group."""

from __future__ import annotations

from collections.abc import Sequence

from variable_batch_size._validation import value_error
from variable_batch_size.rules.base import Rule, check_rule
from variable_batch_size.rules.table import RULES


def rules_for_groups(rule: Rule | str | Sequence[Rule | str], groups: int) -> tuple[Rule, ...]:
    """Return one rule for each of `groups` parameter groups.

    Args:
        rule: a rule or its name in `RULES`, for all groups; or a sequence of these, one for each group.
        groups: number of parameter groups.

    Raises:
        TypeError: for anything that is not a rule.
        ValueError: for an unknown name, a name of a rule that takes arguments, or a sequence of another length.
    """
    if isinstance(rule, str) or not isinstance(rule, Sequence):
        return (_as_rule(rule),) * groups
    if len(rule) != groups:
        raise value_error(
            "a sequence of rules must hold one for each parameter group",
            f"{len(rule)} for {groups}",
            "pass as many, or one rule for all; to add a group later, add it to the inner optimizer and wrap it again",
        )
    return tuple(map(_as_rule, rule))


def _as_rule(rule: Rule | str) -> Rule:
    if not isinstance(rule, str):
        check_rule(rule)
        return rule
    if rule not in RULES:
        raise value_error(f"rule must be one of {', '.join(RULES)}", repr(rule), "pass one of these names, or a rule")
    try:
        return RULES[rule]()
    except TypeError:
        made = RULES[rule].__name__
        raise ValueError(
            f"a rule that takes arguments cannot be chosen by its name alone, but {made} takes some; pass "
            f"rule=vbs.rules.{made}(...) with them"
        ) from None
