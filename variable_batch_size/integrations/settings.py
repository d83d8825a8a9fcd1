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
    """The arguments that integrations have in common: those of `CustomSampler` and `CustomOptimizer`, and a switch.

    Raises:
        ValueError: if options have names of no argument, or there is no such rule, or it needs a `ref_batchsize`.
    """

    trace: TraceLike
    rule: Rule | str | Sequence[Rule | str] = "constant"
    ref_batchsize: int | None = None
    sampler_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    check_loss: bool = True

    def __post_init__(self) -> None:
        """Check the rule and the names of the options, before a trainer begins."""
        groups = len(self.rule) if isinstance(self.rule, (list, tuple)) else 1
        for rule in rules_for_groups(self.rule, groups):
            check_reference(rule, self.ref_batchsize)
        _check_option_names(self.sampler_options, CustomSampler)
        _check_option_names(self.optimizer_options, CustomOptimizer)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Return settings from values by name, where None means the default; raise TypeError without a trace."""
        if values.get("trace") is None:
            raise TypeError('trace= is required, the global batch size; pass trace="0:32 1000:64", for example')
        return cls(**{name: value for name, value in values.items() if value is not None})

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Settings:
        """Remove the settings from the arguments of a trainer, and return them."""
        return cls.of({field.name: options.pop(field.name, None) for field in fields(cls)})

    def wrap_optimizer(self, inner: Optimizer, sampler: Dealer, **defaults: Any) -> CustomOptimizer:
        """Return the optimizer around `inner`, and let every rank compute equally many microbatches of each step.

        Trainers and losses may then communicate in each microbatch. A rank that has fewer repeats one with weight 0.

        Args:
            inner: the optimizer of torch.
            sampler: the sampler of the training.
            **defaults: arguments that the trainer determines, such as `max_grad_norm`; `optimizer_options` win over
                them.
        """
        options = {"rule": self.rule, **defaults, **self.optimizer_options}
        optimizer = CustomOptimizer(inner, sampler, self.ref_batchsize, **options)
        sampler.attach(padded=True)
        return optimizer


def _check_option_names(options: Mapping[str, Any], wrapper: type) -> None:
    """Raise ValueError if an option is no argument of a class."""
    parameters = inspect.signature(wrapper).parameters
    if unknown := sorted({*options} - {*parameters}):
        remedy = f"pass some of {', '.join(parameters)}"
        raise value_error(f"options must be arguments of {wrapper.__name__}", " and ".join(unknown), remedy)
