"""What each integration is told: the trace, the rule, and further arguments of the sampler and of the optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Final, final

from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.data.arriving import ArrivingBatches
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.sampler import CustomSampler, TraceLike
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.rules import Rule
from variable_batch_size.rules.base import check_reference
from variable_batch_size.rules.selection import rules_for_groups

_OPTIONS: Final = {"sampler_options": CustomSampler, "optimizer_options": CustomOptimizer}


@final
@dataclass(frozen=True)
class Settings:
    """The arguments that integrations have in common.

    Attributes:
        trace: the trace of the global batch size, see `CustomSampler`.
        rule: the learning-rate rule, see `CustomOptimizer`.
        ref_batchsize: batch size, in samples, at which the hyperparameters were tuned.
        sampler_options: further arguments of the `CustomSampler`.
        optimizer_options: further arguments of the `CustomOptimizer`.

    Raises:
        TypeError: if the options are not mappings.
        ValueError: if they have names of no argument, or there is no such rule, or it needs a `ref_batchsize`.
    """

    trace: TraceLike
    rule: Rule | str | Sequence[Rule | str] = "constant"
    ref_batchsize: int | None = None
    sampler_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rule in rules_for_groups(self.rule, len(self.rule) if isinstance(self.rule, (list, tuple)) else 1):
            check_reference(rule, self.ref_batchsize)
        for name, kind in _OPTIONS.items():
            options = getattr(self, name)
            if not isinstance(options, Mapping):
                raise type_error(f"{name} must be a dict", options, 'pass {"seed": 1}, for example')
            known = [*inspect.signature(kind).parameters]
            if unknown := sorted(options.keys() - known):
                remedy = f"pass some of {', '.join(known)}"
                raise value_error(f"{name} must be arguments of {kind.__name__}", " and ".join(unknown), remedy)

    def sampler(self, dataset: object, **others: Any) -> CustomSampler:
        """Return a sampler for a dataset.

        Args:
            dataset: the dataset.
            **others: arguments that the framework's own settings determine, such as `minibatch_size`.

        Raises:
            TypeError: if the dataset has no index.
            ValueError: if `sampler_options` has one of `others`.
        """
        check_indexed(dataset)
        assert isinstance(dataset, Sized)
        _check_apart(self.sampler_options, others, "sampler_options")
        return CustomSampler(dataset, self.trace, **others, **self.sampler_options)

    def source(self, **others: Any) -> ArrivingBatches:
        """Return what takes the place of a sampler for a dataset without an index.

        Raises:
            ValueError: if `sampler_options` has others than `fixed_shape`.
        """
        if unknown := sorted(self.sampler_options.keys() - {"fixed_shape"}):
            remedy = "leave it out, or pass a map-style dataset"
            raise value_error(
                "sampler_options of samples without an index may have fixed_shape only", unknown[0], remedy
            )
        return ArrivingBatches(trace=self.trace, **others, **self.sampler_options)  # type: ignore[arg-type]

    def optimizer(self, inner: Optimizer, sampler: Dealer, **others: Any) -> CustomOptimizer:
        """Return the optimizer around `inner`, for which every rank computes equally many microbatches of a step.

        Trainers and losses may then communicate in each of them. A rank that has fewer replays one with weight 0.

        Args:
            inner: the optimizer that updates the weights.
            sampler: the sampler that feeds the training.
            **others: arguments that the framework's own settings determine, such as `max_grad_norm`.

        Raises:
            ValueError: if `optimizer_options` has one of `others`.
        """
        _check_apart(self.optimizer_options, others, "optimizer_options")
        optimizer = CustomOptimizer(
            inner, sampler, self.ref_batchsize, rule=self.rule, **others, **self.optimizer_options
        )
        sampler.attach(padded=True)
        return optimizer


def check_indexed(dataset: object) -> None:
    """Check that samples can be read by their index, which a sampler deals.

    Raises:
        TypeError: if they cannot, as those of an iterable dataset.
    """
    if isinstance(dataset, IterableDataset) or not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
        raise type_error(
            "the dataset must have an index, because each rank is told which samples to read",
            dataset,
            "pass a map-style dataset, with __len__ and __getitem__, instead of an iterable one",
        )


def _check_apart(options: Mapping[str, Any], others: Mapping[str, Any], name: str) -> None:
    if both := sorted(options.keys() & others.keys()):
        raise value_error(
            f"{name} must be what no setting of the trainer determines", " and ".join(both), "leave it out there"
        )
