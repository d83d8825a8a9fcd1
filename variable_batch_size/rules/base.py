"""Learning-rate rules: pure functions of the batch size, and of the gradient's noise where they need it.

A new rule is a frozen dataclass with one method; `CustomOptimizer(inner, sampler, rule=MyRule(), ref_batchsize=128)`
uses it. At `batch_size == ref_batchsize` every factor is 1 (LEGW's when its warm-up is over).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias, final

from variable_batch_size._validation import check_int, check_number, value_error

Factor: TypeAlias = Any  # a float, or a 0-D tensor where it depends on the noise and parameters are not on the CPU


@final
@dataclass(frozen=True, slots=True)
class Noise:
    """The gradient's noise, averaged over updates; nan before the first estimate.

    A rule gets 0-D tensors in the place of floats where the parameters are not on the CPU.

    Attributes:
        sigma2: variance of one sample's gradient: the trace of the covariance.
        mu2: squared norm of the true gradient.
        gain: AdaScale's gain of the update, `adascale_gain`; 1 before the first estimate.
        updates: how many updates gave an estimate.
    """

    sigma2: Factor
    mu2: Factor
    gain: Factor = 1.0
    updates: Factor = 0

    @property
    def noise_scale(self) -> Factor:
        """B_noise = sigma^2 / mu^2, in samples (McCandlish et al. 2018, arXiv 1812.06162, equation 2.9)."""
        if not isinstance(self.mu2, float):
            return self.sigma2 / self.mu2.clamp(min=0)  # without reading it
        if math.isnan(self.mu2):
            return math.nan
        return self.sigma2 / self.mu2 if self.mu2 > 0 else math.inf


def adascale_gain(sigma2: Any, mu2: Any, batch_size: Any, ref_batchsize: Any) -> Any:
    """(sigma^2 / ref + mu^2) / (sigma^2 / B + mu^2), in [1, B / ref] for B >= ref, else in [B / ref, 1].

    How many updates at the reference an update of B samples is worth (Johnson et al. 2020, arXiv 2007.05105,
    equation 4, with B / ref in the place of the number of workers).
    """
    return (sigma2 / ref_batchsize + mu2) / (sigma2 / batch_size + mu2)


@final
@dataclass(frozen=True, slots=True)
class RuleInput:
    """What a rule may look at.

    Attributes:
        batch_size: samples of the update, over all ranks; the true number, also in an epoch's shortened last step.
        ref_batchsize: samples at which the user's hyperparameters were tuned.
        updates: updates before this one.
        samples: samples of all updates before this one.
        noise: the gradient's noise, this update's included; None where nothing measures it, which
            `CustomOptimizer(noise=...)` or a `needs_noise = True` in the rule's class makes.
    """

    batch_size: int
    ref_batchsize: int
    updates: int = 0
    samples: int = 0
    noise: Noise | None = None

    @property
    def ratio(self) -> float:
        """k = batch_size / ref_batchsize."""
        return self.batch_size / self.ref_batchsize


@final
@dataclass(frozen=True, slots=True)
class Scaling:
    """Factors on the reference values, for one update, and by how many reference updates the training moves on.

    `lr`, `gradient` and `progress` may be 0-D tensors, as the noise may.

    Attributes:
        lr: on the learning rate of every parameter group.
        gradient: on the whole gradient, after clipping.
        weight_decay: on the weight decay.
        one_minus_beta: on 1 - beta, for every beta (Adam) or alpha (RMSprop) of a group. Adam and AdamW then correct
            their bias by the betas that were used; others (NAdam, RAdam, Adamax) by the present ones, as by themselves.
        eps: on eps.
        progress: in reference updates.
    """

    lr: Factor = 1.0
    gradient: Factor = 1.0
    weight_decay: float = 1.0
    one_minus_beta: float = 1.0
    eps: float = 1.0
    progress: Factor = 1.0


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
    _check_rule(rule)
    if ref_batchsize is None and not isinstance(rule, ConstantRule):
        raise ValueError(f"{rule} needs ref_batchsize, the batch size at which the learning rate was tuned; pass it")
    remedy = "pass the batch size at which the learning rate was tuned"
    return None if ref_batchsize is None else check_int(ref_batchsize, "ref_batchsize", 1, remedy=remedy)


def _check_rule(rule: object) -> None:
    if isinstance(rule, type) or not callable(rule):
        raise TypeError(f"rule must be an object to call, such as LinearRule(), got {rule!r:.60}; pass one")


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


@final
@dataclass(frozen=True, slots=True)
class SqrtSDERule:
    """lr * sqrt(k), (1 - beta) * k, eps / sqrt(k), for Adam and RMSprop (Malladi et al. 2022, arXiv 2205.10287).

    The square-root scaling rule of section 5: the optimizer keeps to the same stochastic differential equation, in
    which time is counted in samples, so its averages reach as many samples back as at the reference. Betas that this
    takes out of [0, 1) are refused.
    """

    def __call__(self, update: RuleInput) -> Scaling:
        """Factor sqrt(k) on lr, k on 1 - beta and 1 / sqrt(k) on eps."""
        root = update.ratio**0.5
        return Scaling(lr=root, one_minus_beta=update.ratio, eps=1 / root, progress=update.ratio)


@final
@dataclass(frozen=True, slots=True)
class LEGWRule:
    """lr * sqrt(k) * min(1, u / U) at update number u = 1, 2, ...: LEGW (You et al. 2019, arXiv 1901.08256).

    "Linear-epoch gradual warm-up": its length in epochs grows as the batch size does, so in updates it is always U.
    The one rule with a warm-up of its own: its factor is 1 at the reference only when that is over.

    Args:
        warmup_updates: U, in updates; 0 for none.

    Raises:
        ValueError: when U is no finite number >= 0.
    """

    warmup_updates: float

    def __post_init__(self) -> None:
        checked = check_number(
            self.warmup_updates, "warmup_updates", "pass how many updates the learning rate grows for"
        )
        object.__setattr__(self, "warmup_updates", checked)

    def __call__(self, update: RuleInput) -> Scaling:
        """Factor sqrt(k) on lr, and less of it in the warm-up, which begins with 1 / U and not with 0."""
        begun = update.updates + 1
        grown = begun / self.warmup_updates if begun < self.warmup_updates else 1.0
        return Scaling(lr=update.ratio**0.5 * grown, progress=update.ratio)


@final
@dataclass(frozen=True, slots=True)
class AdaScaleRule:
    """lr * gain, the gain of `adascale_gain`: as much progress an update as its noise allows (Johnson et al. 2020)."""

    needs_noise: ClassVar[bool] = True

    def __call__(self, update: RuleInput) -> Scaling:
        """Factor `gain` on lr; the training moves on by as many reference updates."""
        gain = _measured(self, update).gain
        return Scaling(lr=gain, progress=gain)


@final
@dataclass(frozen=True, slots=True)
class AdamScaleRule:
    """lr * sqrt(gain), for Adam and its like (Qiao et al. 2021, arXiv 2008.12260, section 3.2).

    The gain is AdaScale's, of the plain gradients, and so is the progress of an update.
    """

    needs_noise: ClassVar[bool] = True

    def __call__(self, update: RuleInput) -> Scaling:
        """Factor sqrt(gain) on lr."""
        gain = _measured(self, update).gain
        return Scaling(lr=math.sqrt(gain) if isinstance(gain, float) else gain.sqrt(), progress=gain)


def _measured(rule: Rule, update: RuleInput) -> Noise:
    if update.noise is None:
        raise ValueError(f"{rule} needs the gradient's noise, but the input has none; let a CustomOptimizer call it")
    return update.noise


@final
@dataclass(frozen=True, slots=True)
class ConstantTimescale:
    """Another rule, with lambda * k / (its factor on lr) for weight decay: B / (lr * lambda) stays what it was.

    That is the timescale, in samples, over which AdamW averages its updates (Wang & Aitchison 2024, arXiv 2405.13698).
    Without it every rule but the momentum one leaves lambda alone, and the timescale moves by k / (factor on lr).

    Args:
        rule: gives all the other factors.

    Raises:
        TypeError: when that is no rule.
    """

    rule: Rule

    def __post_init__(self) -> None:
        _check_rule(self.rule)

    @property
    def needs_noise(self) -> bool:
        """Whether the rule does."""
        return needs_noise(self.rule)

    def __call__(self, update: RuleInput) -> Scaling:
        """The rule's own factors, but k / (factor on lr) on weight decay."""
        scaling = self.rule(update)
        if isinstance(scaling.lr, (int, float)) and scaling.lr == 0:
            raise value_error(
                f"{self} divides by a factor on lr, which must not be 0", "0", "let the rule give another"
            )
        return replace(scaling, weight_decay=update.ratio / scaling.lr)


# One rule for all parameter groups, or one for each. -----------------------------------------------------------------

Rules = Rule | tuple[Rule, ...]


def checked_rules(rule: Rule | Sequence[Rule] | None, ref_batchsize: object, groups: int) -> tuple[Rules, int | None]:
    """One rule, the constant one by default, or one for each of so many groups; and the reference they share.

    Raises:
        TypeError, ValueError: naming what was found.
    """
    if rule is None:
        rule = ConstantRule()
    if not isinstance(rule, Sequence) or isinstance(rule, str):  # type: ignore[unreachable]
        return rule, checked_reference(rule, ref_batchsize)
    if len(rule) != groups:
        raise value_error(
            "a sequence of rules must hold one for each parameter group",
            f"{len(rule)} for {groups}",
            "pass as many, or one rule for all; to add a group later, add it to the inner optimizer and wrap that anew",
        )
    references = [checked_reference(one, ref_batchsize) for one in rule]
    return tuple(rule), references[0]


def each(rules: Rules) -> tuple[Rule, ...]:
    """One after another, the one for all parameter groups too."""
    return rules if isinstance(rules, tuple) else (rules,)


def needs_noise(rules: Rules) -> bool:
    """Whether one of them looks at the gradient's noise."""
    return any(getattr(rule, "needs_noise", False) for rule in each(rules))
