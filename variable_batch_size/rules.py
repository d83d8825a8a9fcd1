"""Learning-rate rules: pure functions of the batch size, and of the gradient's noise where they need it.

A new rule is a frozen dataclass with one method; `CustomOptimizer(inner, sampler, rule=MyRule(), ref_batchsize=128)`
uses it. At `batch_size == ref_batchsize` every factor is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from variable_batch_size.validate import whole


@final
@dataclass(frozen=True, slots=True)
class RuleInput:
    """What a rule may look at.

    Attributes:
        batch_size: samples of the update, over all ranks; the true number, also in an epoch's shortened last step.
        ref_batchsize: samples at which the user's hyperparameters were tuned.
        updates: updates before this one.
        samples: samples of all updates before this one.
        noise: the gradient's noise; None as long as nothing measures it.
    """

    batch_size: int
    ref_batchsize: int
    updates: int = 0
    samples: int = 0
    noise: None = None

    @property
    def ratio(self) -> float:
        """k = batch_size / ref_batchsize."""
        return self.batch_size / self.ref_batchsize


@final
@dataclass(frozen=True, slots=True)
class Scaling:
    """Factors on the reference values, for one update, and by how many reference updates the training moves on.

    Attributes:
        lr: on the learning rate of every parameter group.
        gradient: on the whole gradient, after clipping.
        weight_decay: on the weight decay.
        one_minus_beta: on 1 - beta, for every beta (Adam) or alpha (RMSprop) of a group.
        eps: on eps.
        progress: in reference updates.
    """

    lr: float = 1.0
    gradient: float = 1.0
    weight_decay: float = 1.0
    one_minus_beta: float = 1.0
    eps: float = 1.0
    progress: float = 1.0


class Rule(Protocol):
    """(batch size, noise) -> factors."""

    def __call__(self, update: RuleInput) -> Scaling:
        """The factors for one update."""
        ...


def checked_reference(rule: Rule, ref_batchsize: object) -> int | None:
    """The reference of a rule; refuses one that it cannot be compared with, and what is no rule.

    Raises:
        TypeError, ValueError: naming what was found.
    """
    if isinstance(rule, type) or not callable(rule):
        raise TypeError(f"rule must be an object to call, such as LinearRule(), got {rule!r:.60}; pass one")
    if ref_batchsize is None and not isinstance(rule, ConstantRule):
        raise ValueError(f"{rule} needs ref_batchsize, the batch size at which the learning rate was tuned; pass it")
    remedy = "pass the batch size at which the learning rate was tuned"
    return None if ref_batchsize is None else whole(ref_batchsize, "ref_batchsize", 1, remedy=remedy)


@final
@dataclass(frozen=True, slots=True)
class ConstantRule:
    """No scaling: factor 1, whatever the batch size."""

    def __call__(self, update: RuleInput) -> Scaling:
        """Factor 1; the training moves on by one update."""
        return Scaling()


@final
@dataclass(frozen=True, slots=True)
class LinearRule:
    """lr * k with k = B / ref_batchsize: as much movement a sample as at the reference (Goyal et al. 2017, 2.1).

    For momentum in PyTorch's form (u = m u + g, w -= lr u) no momentum correction is due: the learning rate
    multiplies the whole velocity.
    """

    def __call__(self, update: RuleInput) -> Scaling:
        """Factor k on lr."""
        return Scaling(lr=update.ratio, progress=update.ratio)


@final
@dataclass(frozen=True, slots=True)
class RootRule:
    """lr * sqrt(k) with k = B / ref_batchsize: the same variance of an update as at the reference (Krizhevsky 2014)."""

    def __call__(self, update: RuleInput) -> Scaling:
        """Factor sqrt(k) on lr."""
        return Scaling(lr=update.ratio**0.5, progress=update.ratio)


@final
@dataclass(frozen=True, slots=True)
class LinearMomentumRule:
    """The linear rule inside the velocity: u = m u + k (G + decay w), w -= lr u (SGD only; Goyal et al. 2017, eq. 9).

    Each gradient keeps the weight that the batch size at its own update gave it, while lr stays.
    """

    def __call__(self, update: RuleInput) -> Scaling:
        """Factor k on gradient and weight decay."""
        return Scaling(gradient=update.ratio, weight_decay=update.ratio, progress=update.ratio)
