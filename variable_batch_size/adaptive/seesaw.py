"""A batch size that grows where a schedule would lower the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from variable_batch_size._validation import MAX_INT, check_int, check_number, type_error, value_error
from variable_batch_size.adaptive.base import ControlInput, as_samples
from variable_batch_size.rules.base import Rule, RuleInput, needs_noise


@final
@dataclass(frozen=True, slots=True)
class Seesaw:
    """Controller for the root rule: B = batch_size / schedule(samples), at least `batch_size`, at most `critical`.

    Where the schedule divides the learning rate by a, Seesaw multiplies the batch size by a, and divides the learning
    rate by sqrt(a) only. Keep the schedule of the learning rate as it is, in samples, and use the root rule with
    `ref_batchsize` = `batch_size`: it multiplies by sqrt(a). From `critical` on, only the learning rate falls.

    Use when: Adam-like optimizers with a decaying schedule, to make fewer updates of the same samples.
    Fails when: the rule is not the root rule; the batch size is large from the start, so that noise does not dominate;
    the schedule begins with a warm-up, which would be taken for a decay: use another controller until its end.
    Source: Meterez et al. 2025, arXiv 2510.14717.

    >>> seesaw = Seesaw(lambda samples: 0.5 ** (samples // 10_000), batch_size=256, critical=2048)
    >>> [seesaw(ControlInput(devices=1, samples=samples)) for samples in (0, 10_000, 20_000, 90_000)]
    [256, 512, 1024, 2048]

    Args:
        schedule: a pure function: samples so far -> factor on the learning rate, >= 0.
        batch_size: where the factor is 1, in samples.
        critical: largest batch size, beyond which samples are wasted, in samples, >= `batch_size`.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if a batch size is not in its range.
    """

    schedule: Callable[[int], float]
    batch_size: int
    critical: int

    def __post_init__(self) -> None:
        """Check the arguments."""
        schedule: object = self.schedule
        if not callable(schedule):
            requirement = "schedule must be a function of the samples so far"
            raise type_error(requirement, schedule, "pass one that returns the factor on the learning rate")
        object.__setattr__(self, "batch_size", check_int(self.batch_size, "batch_size", 1, MAX_INT))
        object.__setattr__(self, "critical", check_int(self.critical, "critical", self.batch_size, MAX_INT))

    def check_rule(self, rule: Rule) -> None:
        """Raise ValueError unless a rule multiplies the learning rate by the root of B / ref_batchsize."""
        if needs_noise(rule) or rule(RuleInput(batch_size=4, ref_batchsize=1)).lr != 2:
            requirement = "Seesaw needs a rule that multiplies lr by the root of B / ref_batchsize"
            raise value_error(requirement, rule, 'use RootRuleOptimizer, or rule="root"')

    def __call__(self, input: ControlInput, /) -> int:
        """Return the batch size at the samples so far, rounded.

        Raises:
            TypeError: if the schedule returns no number.
            ValueError: if the schedule returns a negative or infinite number, or nan.
        """
        name = f"schedule({input.samples})"
        factor = check_number(self.schedule(input.samples), name, "let it return a factor on the learning rate")
        wanted = self.batch_size / factor if factor else math.inf
        return as_samples(min(max(wanted, self.batch_size), self.critical))
