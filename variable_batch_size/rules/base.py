"""What rules share: their input, their output, and what an optimizer asks of them.

A rule is a frozen dataclass in a file of its own, with one line in `variable_batch_size.rules.table`. Its docstring has
the lines "Scales:", "Progress:", "Use when:", "Fails when:" and, if there is a paper, "Source:"; a test holds the table
of rules in the docs to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

from variable_batch_size._validation import check_int, type_error

Factor: TypeAlias = Any  # a float, or a 0-D tensor if it depends on the noise and the parameters are not on the CPU


@final
@dataclass(frozen=True, slots=True)
class Noise:
    """The gradient noise, averaged over updates; nan before the first estimate.

    If the parameters are not on the CPU, a rule gets 0-D tensors instead of floats.

    Attributes:
        sigma2: variance of the gradient of one sample: the trace of its covariance.
        mu2: squared norm of the true gradient.
        gain: AdaScale's gain of the update, see `adascale_gain`; min(1, B / ref) until the first estimate.
        updates: number of updates that gave an estimate.
    """

    sigma2: Factor
    mu2: Factor
    gain: Factor = 1.0
    updates: Factor = 0

    @property
    def noise_scale(self) -> Factor:
        """B_noise = sigma^2 / mu^2, in samples (McCandlish et al. 2018, arXiv 1812.06162, equation 2.9)."""
        if not isinstance(self.mu2, float):
            return self.sigma2 / self.mu2.clamp(min=0)  # without a host sync
        if math.isnan(self.mu2):
            return math.nan
        return self.sigma2 / self.mu2 if self.mu2 > 0 else math.inf


@final
@dataclass(frozen=True, slots=True)
class RuleInput:
    """What a rule may use to compute the factors of an update.

    Attributes:
        batch_size: samples of the update, over all ranks; the true number also for the shortened last step of an epoch.
        ref_batchsize: batch size, in samples, at which the user's hyperparameters were tuned.
        updates: number of updates before this one.
        samples: number of samples of all updates before this one.
        noise: the gradient noise, including this update's; None unless it is measured, which
            `CustomOptimizer(noise=...)` or `needs_noise = True` in the class of the rule requests.
    """

    batch_size: int
    ref_batchsize: int
    updates: int = 0
    samples: int = 0
    noise: Noise | None = None

    @property
    def ratio(self) -> float:
        """k = batch_size / ref_batchsize.

        >>> RuleInput(batch_size=96, ref_batchsize=64).ratio
        1.5
        """
        return self.batch_size / self.ref_batchsize


@final
@dataclass(frozen=True, slots=True)
class Scaling:
    """Factors on the reference hyperparameters for one update, and the progress that the update makes.

    `lr`, `gradient` and `progress` may be 0-D tensors, as the noise may.

    Attributes:
        lr: factor on the learning rate of every parameter group.
        gradient: factor on the reduced gradient, after clipping.
        weight_decay: factor on the weight decay.
        one_minus_beta: factor on 1 - beta, for each beta (Adam) or alpha (RMSprop) of a group. Adam and AdamW then
            correct bias by the betas that were used; NAdam, RAdam and Adamax by the betas of the update.
        eps: factor on eps.
        progress: progress of the training by this update, in updates at `ref_batchsize`.
        beta2_power: exponent of the second beta (Adam) or of alpha (RMSprop) of a group, after the factor on 1 - beta.
        beta1_power: exponent of the other betas.
    """

    lr: Factor = 1.0
    gradient: Factor = 1.0
    weight_decay: float = 1.0
    one_minus_beta: float = 1.0
    eps: float = 1.0
    progress: Factor = 1.0
    beta2_power: float = 1.0
    beta1_power: float = 1.0

    @property
    def scales_betas(self) -> bool:
        """Whether it changes any beta."""
        return (self.one_minus_beta, self.beta2_power, self.beta1_power) != (1, 1, 1)

    def scaled_beta(self, beta: float) -> float:
        """Return 1 - one_minus_beta * (1 - beta), which may lie outside [0, 1); rounding does not make 0 negative.

        >>> Scaling(one_minus_beta=2.0).scaled_beta(0.75)
        0.5
        """
        factor = self.one_minus_beta
        if factor == 1:
            return beta
        scaled = 1 - factor * (1 - beta)
        return 0.0 if abs(scaled) <= factor * 2**-51 else scaled

    def scaled_alpha(self, alpha: float) -> float:
        """Return scaled_beta(alpha)^beta2_power, for the decay of a second moment; a value outside [0, 1) as it is.

        >>> Scaling(beta2_power=2.0).scaled_alpha(0.5)
        0.25
        """
        return self._scaled_power(alpha, self.beta2_power)

    def scaled_betas(self, betas: Sequence[float]) -> tuple[float, ...]:
        """Return the betas of a group for the update: each `scaled_beta`, to the power `beta2_power` or `beta1_power`.

        >>> Scaling(beta2_power=2.0).scaled_betas((0.5, 0.5))
        (0.5, 0.25)
        """
        powers = (self.beta2_power if index == 1 else self.beta1_power for index in range(len(betas)))
        return tuple(map(self._scaled_power, betas, powers))

    def _scaled_power(self, beta: float, power: float) -> float:
        """Return scaled_beta(beta)^power; a value below 0 as it is."""
        scaled = self.scaled_beta(beta)
        return scaled if power == 1 or scaled < 0 else scaled**power


@final
@dataclass(frozen=True, slots=True)
class RuleContext:
    """What is known of a run before its first update, for a rule's `check`.

    Attributes:
        optimizer: names of the inner optimizer's class and its base classes, the class first.
        groups: the hyperparameters of each parameter group that the rule scales.
        ref_batchsize: batch size, in samples, at which they were tuned; None if the user gave none.
        max_batch_size: largest batch size of the trace, in samples.
    """

    optimizer: tuple[str, ...]
    groups: tuple[Mapping[str, Any], ...]
    ref_batchsize: int | None
    max_batch_size: int


class Rule(Protocol):
    """A pure function from the batch size and the gradient noise to factors: a callable `(RuleInput) -> Scaling`.

    The class of a rule may also define

    - `needs_noise: ClassVar[bool] = True`, if it uses `RuleInput.noise` (default: False);
    - `needs_squares: ClassVar[bool] = True`, if Adam's second moment is to be that at `ref_batchsize`, see
      `InvariantAdamRule` (default: False);
    - `scales_betas: ClassVar[bool] = True`, if it changes betas (default: False); needed with `skip_grad_norm` on XLA;
    - `needs_reference: ClassVar[bool] = False`, if it works without a `ref_batchsize` (default: True);
    - `check(context: RuleContext) -> None`, which raises an error if the rule does not fit the run. It is called if you
      choose the rule by its name, or use its named optimizer; a rule that you pass as an object is not checked.
    """

    def __call__(self, update: RuleInput) -> Scaling:
        """Return the factors for one update."""
        ...


def check_rule(rule: object) -> None:
    """Raise TypeError unless `rule` is a callable object, such as an instance of a rule's class."""
    if isinstance(rule, type) or not callable(rule):
        requirement = "rule must be a name, or a callable object such as LinearRule()"
        raise type_error(requirement, rule, "pass vbs.rules.LinearRule() or a name in vbs.rules.RULES")


def check_second_moment(rule: Rule, context: RuleContext) -> None:
    """Raise TypeError unless the inner optimizer is Adam, AdamW or RMSprop, or a subclass."""
    if not {"Adam", "RMSprop"} & set(context.optimizer):
        raise TypeError(
            f"{rule} scales the betas of adaptive optimizers, so the inner optimizer must be a torch.optim.Adam, "
            f"AdamW or RMSprop, got {context.optimizer[0]}; use the root rule, or the linear rule for SGD"
        )


def needs_noise(rule: object) -> bool:
    """Return whether a rule, or a controller, uses the gradient noise."""
    return bool(getattr(rule, "needs_noise", False))


def needs_squares(rule: object) -> bool:
    """Return whether a rule needs the squares of the gradients of microbatches."""
    return bool(getattr(rule, "needs_squares", False))


def scales_betas(rule: object) -> bool:
    """Return whether a rule says that it changes betas."""
    return bool(getattr(rule, "scales_betas", False))


def check_reference(rule: Rule, ref_batchsize: object) -> int | None:
    """Return the reference batch size, in samples, for a rule.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is < 1, or missing although the rule needs it.
    """
    remedy = "pass the batch size at which the learning rate was tuned"
    if ref_batchsize is not None:
        return check_int(ref_batchsize, "ref_batchsize", 1, remedy=remedy)
    if getattr(rule, "needs_reference", True):
        raise ValueError(f"{rule} needs ref_batchsize, but it is None; {remedy}")
    return None


def required_noise(rule: Rule, update: RuleInput) -> Noise:
    """Return the noise of the input; ValueError if there is none."""
    if update.noise is None:
        raise ValueError(f"{rule} needs the gradient noise, but the input has none; let a CustomOptimizer call it")
    return update.noise
