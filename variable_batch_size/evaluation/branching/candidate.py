"""What a branch trains with: a rule, and a factor on the learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import final

from variable_batch_size._validation import check_positive, type_error, value_error
from variable_batch_size.evaluation.cell import rule_of
from variable_batch_size.rules import RULES
from variable_batch_size.rules.base import Rule, RuleInput, needs_noise


@final
@dataclass(frozen=True)
class Candidate:
    """A rule, and a factor on the learning rate that the checkpoint has.

    >>> str(Candidate("power:0.75", 0.5)), Candidate.of("root*2")
    ('power:0.75*0.5', Candidate(rule='root', lr_factor=2.0))

    Args:
        rule: name of the rule, with its number if it takes one, see `rule_of`.
        lr_factor: factor on the learning rate.

    Raises:
        TypeError: if the factor is not a number.
        ValueError: if there is no such rule, or the factor is not positive.
    """

    rule: str
    lr_factor: float = 1.0

    def __post_init__(self) -> None:
        rule_of(self.rule)
        check_positive(self.lr_factor, "lr_factor", "pass a factor on the learning rate")

    @classmethod
    def of(cls, text: Candidate | str) -> Candidate:
        """Return the candidate that a text stands for: a rule, or a rule and a factor, such as "root*0.5"."""
        if isinstance(text, Candidate):
            return text
        if not isinstance(text, str):
            raise type_error("a candidate must be a Candidate, or its text", text, 'pass "root" or "root*0.5"')
        rule, star, factor = text.partition("*")
        try:
            return cls(rule, float(factor) if star else 1.0)
        except ValueError:
            if star and rule_of(rule):
                requirement = f"the factor of the candidate {rule} must be a positive number"
                raise value_error(requirement, f"{factor!r:.60}", f'pass "{rule}*0.5"') from None
            if not star and (name := text.rstrip("0123456789.")) != text and name in RULES:  # root0.5
                requirement = "a candidate must be a rule, or a rule, * and a factor"
                raise value_error(requirement, repr(text), f'pass "{name}*{text[len(name) :]}"') from None
            raise

    def course(self, updates: Iterable[RuleInput]) -> object:
        """Return what is equal for candidates that train alike: their factors in each update; of measured ones, itself.

        Args:
            updates: those of the branch.
        """
        found = rule_of(self.rule)
        rule: Rule = RULES[found]() if isinstance(found, str) else found
        if needs_noise(rule):
            return self
        scalings = (rule(update) for update in updates)
        alike = (astuple(replace(one, lr=self.lr_factor * one.lr, progress=1.0)) for one in scalings)
        return tuple(tuple(f"{factor:.12g}" for factor in factors) for factors in alike)

    def __str__(self) -> str:
        """Return its text."""
        return self.rule if self.lr_factor == 1 else f"{self.rule}*{self.lr_factor:g}"
