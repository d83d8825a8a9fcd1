"""What each integration is told: the trace, the rule, and further arguments of the sampler and of the optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, final

from torch.optim import Optimizer

from variable_batch_size._validation import value_error
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.sampler import CustomSampler, TraceLike
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.rules import Rule
from variable_batch_size.rules.base import check_reference
from variable_batch_size.rules.selection import rules_for_groups


@final
@dataclass(frozen=True)
class Settings:
    """The arguments that integrations have in common: those of `CustomSampler` and `CustomOptimizer`.

    Raises:
        ValueError: if options have names of no argument, or there is no such rule, or it needs a `ref_batchsize`.
    """

    trace: TraceLike
    rule: Rule | str | Sequence[Rule | str] = "constant"
    ref_batchsize: int | None = None
    sampler_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rule in rules_for_groups(self.rule, len(self.rule) if isinstance(self.rule, (list, tuple)) else 1):
            check_reference(rule, self.ref_batchsize)
        for kind, options in (CustomSampler, self.sampler_options), (CustomOptimizer, self.optimizer_options):
            if unknown := sorted({*options} - {*(known := inspect.signature(kind).parameters)}):
                remedy = f"pass some of {', '.join(known)}"
                raise value_error(f"options must be arguments of {kind.__name__}", " and ".join(unknown), remedy)

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Settings:
        """Take them out of the arguments of a trainer, where None is the default."""
        given = {field.name: options.pop(field.name, None) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def optimizer(self, inner: Optimizer, sampler: Dealer, **others: Any) -> CustomOptimizer:
        """Return the optimizer around `inner`, for which every rank computes equally many microbatches of a step.

        Trainers and losses may then communicate in each of them. A rank that has fewer replays one with weight 0.
        `others` are arguments that the trainer determines, such as `max_grad_norm`; `optimizer_options` win over them.
        """
        options = {"rule": self.rule, **others, **self.optimizer_options}
        optimizer = CustomOptimizer(inner, sampler, self.ref_batchsize, **options)
        sampler.attach(padded=True)
        return optimizer
