"""`CustomOptimizer` with a rule of the table, `vbs.rules.RULES`, filled in: one short class for each."""

from __future__ import annotations

from typing import ClassVar, final

from torch.optim import Optimizer
from typing_extensions import Unpack

from variable_batch_size._validation import check_number, suggests, value_error
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.options import OptimizerOptions
from variable_batch_size.rules import LEGWRule, PowerRule
from variable_batch_size.rules.base import check_reference


class NamedOptimizer(CustomOptimizer):
    """A `CustomOptimizer` whose class chooses the rule; abstract. Arguments: see `CustomOptimizer`.

    Attributes:
        rule_name: the rule's name in `vbs.rules.RULES`.
    """

    rule_name: ClassVar[str]

    @suggests
    def __init__(
        self, inner: Optimizer, sampler: Dealer, ref_batchsize: int | None = None, **options: Unpack[OptimizerOptions]
    ) -> None:
        super().__init__(inner, sampler, ref_batchsize, rule=self.rule_name, **options)


@final
class ConstantOptimizer(NamedOptimizer):
    """Keep the learning rate, whatever the batch size. Arguments: see `CustomOptimizer`."""

    rule_name = "constant"


@final
class LinearRuleOptimizer(NamedOptimizer):
    """lr * B / ref_batchsize (Goyal et al. 2017, arXiv 1706.02677). Arguments: see `CustomOptimizer`."""

    rule_name = "linear"


@final
class RootRuleOptimizer(NamedOptimizer):
    """lr * sqrt(B / ref_batchsize) (Krizhevsky 2014, arXiv 1404.5997). Arguments: see `CustomOptimizer`."""

    rule_name = "root"


@final
class PowerRuleOptimizer(CustomOptimizer):
    """lr * (B / ref_batchsize)^exponent. Arguments: see `CustomOptimizer`.

    Args:
        inner: see `CustomOptimizer`, as for all arguments that are not named here.
        sampler: feeds the loop.
        ref_batchsize: batch size, in samples, at which the learning rate was tuned.
        exponent: a number >= 0, see `rules.PowerRule`.
        **options: see `CustomOptimizer`.

    Raises:
        TypeError: if the exponent is not a number.
        ValueError: if it is negative or not finite.
    """

    rule_name: ClassVar[str] = "power"

    @suggests
    def __init__(
        self,
        inner: Optimizer,
        sampler: Dealer,
        ref_batchsize: int,
        *,
        exponent: float,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(inner, sampler, ref_batchsize, rule=PowerRule(exponent), **options)


@final
class LinearRuleMomentumOptimizer(NamedOptimizer):
    """u = m u + (B / ref_batchsize) (G + decay w), w -= lr u, for SGD. Arguments: see `CustomOptimizer`.

    The linear rule inside the velocity: the contribution of a gradient keeps the scale of its own batch size.

    Raises:
        TypeError: if the inner optimizer is not SGD.
    """

    rule_name = "linear-momentum"


@final
class SqrtSDERuleOptimizer(NamedOptimizer):
    """lr * sqrt(k), (1 - beta) * k, eps / sqrt(k) with k = B / ref_batchsize, for Adam, AdamW and RMSprop.

    Malladi et al. 2022, arXiv 2205.10287, section 5. Adam's bias correction uses the betas of all past updates, not
    only the present ones; for this, a hook of the inner step sees lr, eps and a decoupled weight decay scaled a little
    further. RMSprop's alpha is the beta here. Arguments: see `CustomOptimizer`.

    Raises:
        TypeError: if the inner optimizer is not Adam, AdamW or RMSprop.
        ValueError: if the largest batch size of the trace takes a beta out of [0, 1).
    """

    rule_name = "sqrt-sde"


@final
class RootHalfLifeRuleOptimizer(NamedOptimizer):
    """lr * sqrt(k), beta2^k with k = B / ref_batchsize, for Adam, AdamW and RMSprop. Arguments: see `CustomOptimizer`.

    Marek et al. 2025, arXiv 2507.07101, equation 2; see `rules.RootHalfLifeRule`.

    Raises:
        TypeError: if the inner optimizer is not Adam, AdamW or RMSprop.
    """

    rule_name = "root-half-life"


@final
class InvariantAdamRuleOptimizer(NamedOptimizer):
    """lr * k, beta^k with k = B / ref_batchsize, and Adam's second moment as at the reference, for Adam and AdamW.

    Wang and Aitchison 2024, arXiv 2402.18824; see `rules.InvariantAdamRule`. With `max_grad_norm` the gradients of
    microbatches are clipped by the factor on the update's gradient. Arguments: see `CustomOptimizer`.

    Raises:
        TypeError: if the inner optimizer is not Adam or AdamW, or the model is sharded.
        ValueError: if an update of more than `ref_batchsize` samples may have a single microbatch.
    """

    rule_name = "invariant-adam"


@final
class LEGWRuleOptimizer(CustomOptimizer):
    """lr * sqrt(B / ref_batchsize) * min(1, u / U) at update u = 1, 2, ...: LEGW (You et al. 2019, arXiv 1901.08256).

    The length of the warm-up in epochs is proportional to the batch size, so it takes
    U = warmup_epochs * dataset_size / ref_batchsize updates whatever the trace does; the factor at `ref_batchsize` is 1
    only after it. Do not add a warm-up of your own.

    Args:
        inner: see `CustomOptimizer`, as for all arguments that are not named here.
        sampler: the size of its dataset is the length of an epoch.
        ref_batchsize: batch size, in samples, at which the learning rate and the warm-up were tuned.
        warmup_epochs: length of the warm-up at `ref_batchsize`, in epochs; 0 for none.
        **options: see `CustomOptimizer`.

    Raises:
        TypeError: if warmup_epochs is not a number.
        ValueError: if warmup_epochs is negative or not finite.
    """

    rule_name: ClassVar[str] = "legw"

    @suggests
    def __init__(
        self,
        inner: Optimizer,
        sampler: Dealer,
        ref_batchsize: int,
        *,
        warmup_epochs: float,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        epochs = check_number(warmup_epochs, "warmup_epochs", "pass the length of the warm-up at ref_batchsize, or 0")
        reference = check_reference(LEGWRule(0), ref_batchsize)
        if isinstance(sampler, Dealer) and sampler.batches.arriving:
            remedy = "pass rule=vbs.rules.LEGWRule(updates of the warm-up) to vbs.CustomOptimizer"
            raise value_error("the warm-up of LEGW must be in epochs", "batches that arrive, which have none", remedy)
        updates = 0.0
        if reference is not None and isinstance(sampler, CustomSampler):  # otherwise CustomOptimizer raises
            updates = epochs * sampler.plan.dataset_size / reference
        super().__init__(inner, sampler, reference, rule=LEGWRule(updates), **options)


@final
class AdaScaleOptimizer(NamedOptimizer):
    """lr * gain, gain = (sigma^2 / ref + mu^2) / (sigma^2 / B + mu^2) (Johnson et al. 2020, arXiv 2007.05105).

    Arguments: see `CustomOptimizer`. `progress` grows by the gain, in updates at `ref_batchsize`; read a schedule that
    was written for `ref_batchsize` there (`ProgressScheduler`). An update of a single microbatch gives no estimate:
    choose `minibatch_size` such that most updates have at least two microbatches, over all ranks.

    Differences from the paper, section 3 and appendix B:

    - k = B / ref may be any number, also below 1, and may change at every update; sigma^2 and mu^2 are for one
      sample, so nothing is rescaled then.
    - The groups are microbatches, of unequal size, and not workers: the gain does not depend on the world.
    - The averages reach over 1000 reference updates (theta = 1 - k / 1000) whatever k is, include the microbatches of
      the update itself and are debiased; sigma^2 and mu^2 are averaged before they are divided.
    - The gain is min(1, k) until the first estimate, and if all gradients are 0. There is no lower bound of sigma^2, so
      that the gain does not depend on the scale of the loss.

    Around Adam and similar optimizers it warns: use `AdamScaleOptimizer`.
    """

    rule_name = "adascale"


@final
class AdamScaleOptimizer(NamedOptimizer):
    """lr * sqrt(gain), for Adam and similar optimizers, with AdaScale's gain (Qiao et al. 2021, arXiv 2008.12260).

    Similar are Lion, Signum and `torch.optim.Muon`, whose steps do not depend on the size of the gradient, see
    `AdamScaleRule`. Arguments: see `CustomOptimizer`. The gain comes from the plain gradients, before Adam divides
    them; `progress` grows by it. Everything else is as for `AdaScaleOptimizer`.
    """

    rule_name = "adamscale"


@final
class SurgeRuleOptimizer(NamedOptimizer):
    """lr * gain / sqrt(B / ref_batchsize), with AdaScale's gain (Li et al. 2024, arXiv 2405.14578, equation 13).

    For Adam and similar optimizers; the factor falls where B exceeds the noise scale, see `rules.SurgeRule`. Arguments:
    see `CustomOptimizer`.
    """

    rule_name = "surge"
