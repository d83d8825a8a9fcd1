"""From what a user passes as `rule` to one rule for each parameter group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from variable_batch_size._validation import value_error
from variable_batch_size.rules.base import Rule, check_rule
from variable_batch_size.rules.table import RULES


def rules_for_groups(rule: Rule | str | Sequence[Rule | str], groups: int) -> tuple[Rule, ...]:
    """Return one rule for each of `groups` parameter groups.

    Args:
        rule: a rule or its name, see `rule_named`, for all groups; or a sequence of these, one for each group.
        groups: number of parameter groups.

    Raises:
        TypeError: for anything that is not a rule.
        ValueError: for an unknown name, one that lacks its number, or a sequence of another length.
    """
    if isinstance(rule, str) or not isinstance(rule, Sequence):
        return (_as_rule(rule),) * groups
    if len(rule) != groups:
        requirement = "a sequence of rules must hold one for each parameter group"
        remedy = (
            "pass as many, or one rule for all; to add a group later, add it to the inner optimizer and wrap it again"
        )
        raise value_error(requirement, f"{len(rule)} for {groups}", remedy)
    return tuple(map(_as_rule, rule))


def rule_named(text: str) -> Rule:
    """Return the rule of a name, with a number if it takes one: "adascale", "power:0.75", "legw:100".

    Raise ValueError if there is no such rule, or its argument is not a number, or missing.
    """
    name, colon, number = text.partition(":")
    if name not in RULES:
        raise value_error(f"rule must be one of {', '.join(RULES)}", f"{text!r:.60}", "pass one of these, or a rule")
    argument = next(iter(fields(RULES[name])), None)  # type: ignore[arg-type]
    if not colon and (argument is None or argument.default is None):
        return RULES[name]()
    if argument is None:
        raise value_error(f"the rule {name} takes no number", repr(text), f"pass {name}")
    try:
        return RULES[name](float(number))  # type: ignore[call-arg]
    except ValueError:
        found = repr(number) if number else "none"
        raise value_error(f"the rule {name} needs its {argument.name}", found, f"pass {name}:NUMBER") from None


def _as_rule(rule: Rule | str) -> Rule:
    """Return the rule that a user has passed, as an object or by its name, such as "power:0.75"; check an object."""
    if isinstance(rule, str):
        return rule_named(rule)
    check_rule(rule)
    return rule
