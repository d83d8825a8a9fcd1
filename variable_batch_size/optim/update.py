"""From the gradients of a step's microbatches to new weights: weigh, add up over the ranks, measure, scale, step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor
from torch.optim import ASGD, Adafactor, Optimizer, Rprop

from variable_batch_size._validation import value_error
from variable_batch_size.backend import Backend
from variable_batch_size.data.microbatching import Microbatch
from variable_batch_size.data.plan import Step
from variable_batch_size.optim.accumulation import Gradients
from variable_batch_size.optim.bias_correction import BiasCorrection
from variable_batch_size.optim.gradient_noise import Moments
from variable_batch_size.optim.progress import Progress
from variable_batch_size.optim.scaling import Displacement, scaled
from variable_batch_size.rules import ConstantTimescale, Rule, RuleInput, Scaling
from variable_batch_size.rules.base import needs_noise

Reduction = Literal["mean", "sum"]
Estimator = Literal["microbatches", "differenced"]

_NOT_FINITE = (
    "an update was left out, because the gradient of one of its microbatches is not finite; look at the loss, if this "
    "goes on"
)
_NOT_PROPORTIONAL = (ASGD, Adafactor, Rprop)  # to the learning rate is their change


@final
class Updater:
    """Accumulates this rank's microbatches of one step, and then makes the update; see `CustomOptimizer`.

    Attributes:
        gradients: of the step.
        moments: the gradient's noise, where it is measured.
        progress: of the training, in reference updates.
        scaling: of the last update, in the first parameter group.
        rate: the reference learning rate that it scaled there.
    """

    def __init__(
        self,
        inner: Optimizer,
        backend: Backend,
        rules: tuple[Rule, ...],
        ref_batchsize: int | None,
        noise: Estimator | None,
        reduction: Reduction,
        max_grad_norm: float | None,
    ) -> None:
        if reduction not in get_args(Reduction):
            raise ValueError(f'reduction must be "mean" or "sum", as the loss does, got {reduction!r}; pass one')
        if max_grad_norm is not None and not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
            raise value_error("max_grad_norm must be a number > 0", repr(max_grad_norm), "leave it out to do without")
        if noise is not None and noise not in get_args(Estimator):
            raise value_error(
                'noise must be "microbatches" or "differenced"', f"{noise!r:.60}", "pass one or leave it out"
            )
        self.rules, self.ref_batchsize = rules, ref_batchsize
        self.reduction, self.max_grad_norm = reduction, max_grad_norm
        self.progress = Progress()
        self.scaling = Scaling()
        self.rate: Any = inner.param_groups[0].get("lr", 1.0)
        self._inner, self._backend = inner, backend
        self._bias_correction = BiasCorrection(inner, backend)
        self._displacement: Displacement | None = None
        self.noise_from = noise
        self.renew()
        self.moments = self._measuring(noise)

    def renew(self) -> None:
        """Begin with the parameters that the inner optimizer has now."""
        parameters = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        self.gradients = Gradients(parameters, self._backend)
        self._found_inf: Tensor | None = None  # how many gradients of the step were not finite, under a GradScaler
        self._weight = 1.0  # by which the gradients have still to be multiplied

    def clear(self) -> None:
        """Forget the step: for the next one, or because it was broken off."""
        self.gradients.clear()
        self._found_inf, self._weight = None, 1.0
        if self.moments is not None:
            self.moments.clear()

    def add(
        self, microbatch: Microbatch, following: Microbatch | None, found_inf: Tensor | None, grad_scale: Tensor | None
    ) -> None:
        """Count a microbatch whose gradient has come.

        Args:
            microbatch: which it was.
            following: the one that follows on this rank in the same step, if any.
            found_inf: under a `GradScaler`, whether the gradient is not finite, 0-D.
            grad_scale: what the loss was multiplied with, 0-D.
        """
        weight = self._weight_of(microbatch)
        if found_inf is not None:
            found_inf = found_inf * (microbatch.samples > 0)
            self._found_inf = found_inf if self._found_inf is None else self._found_inf + found_inf
            grad_scale = torch.ones_like(found_inf) if grad_scale is None else grad_scale
        if self.moments is not None:
            factor = microbatch.samples / self._divisor(microbatch) ** 2
            self.moments.add(self.gradients.present(), factor, grad_scale)
        if self.moments is not None or grad_scale is not None:
            self.gradients.put_aside(weight, grad_scale)
        elif following is None:
            self._weight = weight
        else:
            self.gradients.keep(weight / self._weight_of(following))

    def apply(self, step: Step, updates: int, samples: int) -> bool:
        """Make this rank's gradients everybody's, and step; False where they are not finite.

        Args:
            step: what was accumulated.
            updates: how many the training had before.
            samples: of these.
        """
        moments = self.moments
        reference = step.batch_size if self.ref_batchsize is None else self.ref_batchsize
        update = RuleInput(step.batch_size, reference, updates, samples)
        scalings = [] if moments else self._scalings(update)
        # One factor for all gradients, which is known by now and does not come after clipping, rides on their weight.
        rides = not (moments or self.max_grad_norm or len(set(map(id, self.rules))) > 1)
        gradients = self.gradients.whole(self._weight * (scalings[0].gradient if rides else 1))
        squares = [moments.share(gradients)] if moments else []
        found_inf = [] if self._found_inf is None else [self._found_inf]
        self._backend.all_reduce_sum([*gradients, *squares, *found_inf])
        if any(self._backend.host(found).item() for found in found_inf):
            return False
        if moments:
            sums = moments.sums(squares[0], gradients)
            if sums.finite is False:
                warnings.warn(_NOT_FINITE, RuntimeWarning, stacklevel=5)
                return False
            self.gradients.spare(sums.finite)
            size, groups = step.batch_size, step.num_microbatches
            noise = moments.update(sums, gradients, batch_size=size, groups=groups, ref=reference)
            scalings = self._scalings(replace(update, noise=noise), sums.finite)
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.gradients.parameters, self.max_grad_norm)
        factors = [scaling.gradient for scaling in scalings]
        if not rides and any(isinstance(factor, Tensor) or factor != 1 or not moments for factor in factors):
            self.gradients.multiply_each(self._inner.param_groups, factors)
        self._step_inner(scalings)
        self.scaling = scalings[0]
        self.progress.add(self.scaling.progress)
        if moments:
            moments.commit()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Progress, noise and bias correction, as far as there are any."""
        noise = {} if self.moments is None else {"noise": self.moments.state_dict()}
        return {"progress": float(self.progress), **noise, **self._bias_correction.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; what is not in it begins anew, but the progress stays."""
        if "progress" in state:
            self.progress = Progress(float(state["progress"]))
        self._bias_correction.load_state_dict(state)
        if self.moments is not None:
            self.moments.load_state_dict(state.get("noise"))

    def _step_inner(self, scalings: Sequence[Scaling]) -> None:
        groups = self._inner.param_groups
        lr = groups[0].get("lr", 1.0)
        self.rate = lr.clone() if isinstance(lr, Tensor) else lr
        with (
            self._bias_correction.corrected(scalings) as corrected,
            scaled(groups, corrected, self._backend),
            self._displacement.by(groups, corrected) if self._displacement else nullcontext(),
        ):
            self._inner.step()

    def _scalings(self, update: RuleInput, finite: Any = True) -> list[Scaling]:
        """The factors of each parameter group; on a device they are 0 where `finite` says no."""
        made: dict[int, Scaling] = {}  # of each rule, which may be that of several groups
        for rule in self.rules:
            if id(rule) not in made:
                scaling = rule(update)
                _check_finite(rule, scaling)
                guarded = isinstance(finite, Tensor)
                made[id(rule)] = self._guarded(scaling, finite.float()) if guarded else scaling
        return [made[id(rule)] for rule in self.rules]

    def _guarded(self, scaling: Scaling, counts: Tensor) -> Scaling:
        lr, progress = (
            (factor if isinstance(factor, Tensor) else self._backend.scalar(factor, counts)) * counts
            for factor in (scaling.lr, scaling.progress)
        )
        return replace(scaling, lr=lr, progress=progress)

    def _weight_of(self, microbatch: Microbatch) -> float:
        """The factor on a microbatch's gradient that makes the step's one the mean over its samples."""
        return microbatch.samples / (microbatch.batch_size * self._divisor(microbatch))

    def _divisor(self, microbatch: Microbatch) -> int:
        """What a microbatch's gradient is divided by to be that of its mean loss."""
        return microbatch.rows if self.reduction == "sum" else 1

    def _measuring(self, noise: Estimator | None) -> Moments | None:
        if noise is None and not any(map(needs_noise, self.rules)):
            return None
        if self.ref_batchsize is None:
            raise value_error(
                "the noise is averaged over 1000 reference updates, so measuring it needs ref_batchsize",
                "none",
                "pass the batch size at which the learning rate was tuned",
            )
        parameters = self.gradients.parameters
        if len({parameter.device for parameter in parameters}) > 1:
            raise ValueError("the noise is measured on one device, but parameters are on several; move them to one")
        deferred = parameters[0].device.type != "cpu"  # numbers that come from gradients stay there
        if deferred:
            self._check_device_factors()
            self._displacement = Displacement(self._inner)
        return Moments(self._backend, deferred=deferred, differenced=noise == "differenced")

    def _check_device_factors(self) -> None:
        """Refuse what a factor on lr cannot do that stays on the device."""
        device = self.gradients.parameters[0].device.type
        if isinstance(self._inner, _NOT_PROPORTIONAL):
            raise TypeError(
                f"on {device} a learning rate that depends on the noise needs an optimizer whose change is "
                f"proportional to it, but that of {type(self._inner).__name__} is not; use another inner optimizer"
            )
        if small := {str(p.dtype) for p in self.gradients.parameters if torch.finfo(p.dtype).bits < 32}:
            raise TypeError(
                f"on {device} a learning rate that depends on the noise needs parameters of at least 32 bits, because "
                f"it multiplies what happened to them, but some are {' and '.join(sorted(small))}; keep the "
                f"parameters in float32, and use torch.autocast"
            )
        for rule in self.rules:
            if isinstance(rule, ConstantTimescale) and rule.needs_noise:
                raise TypeError(
                    f"on {device} the weight decay must not depend on the noise, which is not read there, but that of "
                    f"{rule} does; use the rule without ConstantTimescale"
                )


def _check_finite(rule: object, scaling: Scaling) -> None:
    for factor in fields(scaling):
        value = getattr(scaling, factor.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(
                f"every factor of a rule must be finite, but {rule} gave {factor.name}={value}; let it give 1 where it "
                f"cannot know, as before the first estimate of the noise"
            )
