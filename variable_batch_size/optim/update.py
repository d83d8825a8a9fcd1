"""Make an update from the gradients of a step's microbatches: weight, reduce, measure the noise, clip, scale, step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor
from torch.optim import ASGD, Adafactor, Optimizer, Rprop

from variable_batch_size._validation import check_number, value_error
from variable_batch_size.backend import Backend
from variable_batch_size.data.microbatching import Microbatch
from variable_batch_size.data.plan import Step
from variable_batch_size.optim.accumulation import Gradients
from variable_batch_size.optim.gradient_noise import HORIZON, GradientNoise
from variable_batch_size.optim.progress import Progress
from variable_batch_size.optim.scaling import HyperparameterScaling
from variable_batch_size.rules import ConstantTimescale, Rule, RuleInput, Scaling
from variable_batch_size.rules.base import needs_noise

Reduction = Literal["mean", "sum"]
Estimator = Literal["microbatches", "differenced"]

_SKIPPED = "Skipped an update: non-finite gradient; check the loss if this persists"
_NOT_PROPORTIONAL_TO_LR = (ASGD, Adafactor, Rprop)  # optimizers whose parameter update is not


@final
class Updater:
    """Accumulates this rank's microbatches of one step, and then makes the update; see `CustomOptimizer`.

    Attributes:
        rules: the rule of each parameter group.
        ref_batchsize: reference batch size, in samples; None if there is none.
        gradients: the gradients of the step.
        gradient_noise: the measured noise; None if it is not measured.
        noise_estimator: the argument `noise` of the optimizer.
        progress: progress of the training, in updates at the reference.
        last_scaling: scaling of the first parameter group in the last update.
        reference_lr: learning rate of the first parameter group in the last update, before scaling.
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
            raise value_error('reduction must be "mean" or "sum"', repr(reduction), "pass what the loss does")
        if noise is not None and noise not in get_args(Estimator):
            raise value_error('noise must be "microbatches" or "differenced"', f"{noise!r:.60}", "pass one, or omit it")
        self.rules, self.ref_batchsize = rules, ref_batchsize
        self.rule_per_group = False  # whether the user passed a sequence of rules
        self.reduction, self.max_grad_norm = reduction, _check_max_grad_norm(max_grad_norm)
        self.noise_estimator = noise
        self.progress = Progress()
        self.last_scaling = Scaling()
        self.reference_lr: Any = inner.param_groups[0].get("lr", 1.0)
        self._inner, self._backend = inner, backend
        self.refresh_parameters()
        self.gradient_noise = self._create_gradient_noise(noise)
        deferred_lr = self.gradient_noise is not None and self.gradient_noise.on_device
        self._scaling = HyperparameterScaling(inner, backend, deferred_lr=deferred_lr)

    def refresh_parameters(self) -> None:
        """Start over with the parameters that the inner optimizer has now."""
        parameters = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        self.gradients = Gradients(parameters, self._backend)
        self._found_inf: Tensor | None = None  # 0-D: number of non-finite microbatches under a GradScaler
        self._weight = 1.0  # by which the gradients in .grad must still be multiplied

    def clear(self) -> None:
        """Discard the accumulated microbatches, after an update or to start the step over."""
        self.gradients.clear()
        self._found_inf, self._weight = None, 1.0
        if self.gradient_noise is not None:
            self.gradient_noise.clear()

    def add(
        self, microbatch: Microbatch, following: Microbatch | None, found_inf: Tensor | None, grad_scale: Tensor | None
    ) -> None:
        """Accumulate a microbatch, whose `backward()` has run.

        Args:
            microbatch: the microbatch.
            following: the next microbatch of this rank in the same step; None after the last one.
            found_inf: under a `GradScaler`, whether the gradient is non-finite, 0-D.
            grad_scale: the scale of the loss under a `GradScaler`, 0-D.
        """
        weight = self._weight_of(microbatch)
        if found_inf is not None:
            found_inf = found_inf * (microbatch.samples > 0)
            self._found_inf = found_inf if self._found_inf is None else self._found_inf + found_inf
            grad_scale = torch.ones_like(found_inf) if grad_scale is None else grad_scale
        if self.gradient_noise is not None:
            factor = microbatch.samples / self._divisor(microbatch) ** 2
            self.gradient_noise.add(self.gradients.present(), factor, grad_scale)
        if self.gradient_noise is not None or grad_scale is not None:
            self.gradients.accumulate_buffered(weight, grad_scale)
        elif following is None:
            self._weight = weight
        else:
            self.gradients.accumulate_in_place(weight / self._weight_of(following))

    def apply(self, step: Step, updates: int, samples: int) -> bool:
        """Sum the gradients over the ranks, and step the inner optimizer.

        Args:
            step: the accumulated step.
            updates: number of updates before this one.
            samples: number of samples of those updates.

        Returns:
            False if the update was skipped, because the host has read that a gradient is non-finite.
        """
        noise = self.gradient_noise
        reference = step.batch_size if self.ref_batchsize is None else self.ref_batchsize
        update = RuleInput(step.batch_size, reference, updates, samples)
        scalings = [] if noise else self._scalings(update)
        # A factor on the gradient that all groups share, that is known by now and that no clipping precedes is
        # multiplied together with the weight, which saves a pass over the gradients.
        with_weight = not (noise or self.max_grad_norm or self.rule_per_group)
        gradients = self.gradients.finalize(self._weight * (scalings[0].gradient if with_weight else 1))
        squares = [noise.local_squares(gradients)] if noise else []  # (1,)
        found_inf = [] if self._found_inf is None else [self._found_inf]  # 0-D
        self._backend.all_reduce_sum([*gradients, *squares, *found_inf])
        if any(self._backend.host(found).item() for found in found_inf):
            return False
        if noise:
            statistics = noise.statistics(squares[0], gradients)
            if statistics.finite is False:
                warnings.warn(_SKIPPED, RuntimeWarning, stacklevel=5)
                return False
            self.gradients.zero_nonfinite(statistics.finite)
            size, groups = step.batch_size, step.num_microbatches
            measured = noise.update(statistics, gradients, batch_size=size, groups=groups, ref=reference)
            scalings = self._scalings(replace(update, noise=measured), statistics.finite)
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.gradients.parameters, self.max_grad_norm)
        factors = [scaling.gradient for scaling in scalings]
        if not with_weight and any(isinstance(factor, Tensor) or factor != 1 or not noise for factor in factors):
            self.gradients.multiply_groups(self._inner.param_groups, factors)
        self._step_inner(scalings)
        self.last_scaling = scalings[0]
        self.progress.add(self.last_scaling.progress)
        if noise:
            noise.commit()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return progress and, if there are any, noise and bias correction."""
        noise = {} if self.gradient_noise is None else {"noise": self.gradient_noise.state_dict()}
        return {"progress": float(self.progress), **noise, **self._scaling.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; noise and bias correction are reset if it has none, and the progress stays."""
        if "progress" in state:
            self.progress = Progress(float(state["progress"]))
        self._scaling.load_state_dict(state)
        if self.gradient_noise is not None:
            self.gradient_noise.load_state_dict(state.get("noise"))

    def _step_inner(self, scalings: Sequence[Scaling]) -> None:
        lr = self._inner.param_groups[0].get("lr", 1.0)
        self.reference_lr = lr.clone() if isinstance(lr, Tensor) else lr
        with self._scaling.applied(scalings):
            self._inner.step()

    def _scalings(self, update: RuleInput, finite: Any = True) -> list[Scaling]:
        """Return the scaling of each parameter group; lr and progress get 0 if the tensor `finite` is false."""
        by_rule: dict[int, Scaling] = {}  # several groups may share a rule
        for rule in self.rules:
            if id(rule) not in by_rule:
                scaling = rule(update)
                _check_finite(rule, scaling)
                on_device = isinstance(finite, Tensor)
                by_rule[id(rule)] = self._zero_if(scaling, finite.float()) if on_device else scaling
        return [by_rule[id(rule)] for rule in self.rules]

    def _zero_if(self, scaling: Scaling, finite: Tensor) -> Scaling:
        """Multiply the factor on lr and the progress by `finite`, 0-D, which is 0 or 1."""
        lr, progress = (
            (factor if isinstance(factor, Tensor) else self._backend.scalar(factor, finite)) * finite
            for factor in (scaling.lr, scaling.progress)
        )
        return replace(scaling, lr=lr, progress=progress)

    def _weight_of(self, microbatch: Microbatch) -> float:
        """Return the factor on a microbatch's gradient such that the sum over the step is its mean over samples."""
        return microbatch.samples / (microbatch.batch_size * self._divisor(microbatch))

    def _divisor(self, microbatch: Microbatch) -> int:
        """Return the number by which to divide a microbatch's gradient to get that of its mean loss."""
        return microbatch.rows if self.reduction == "sum" else 1

    def _create_gradient_noise(self, estimator: Estimator | None) -> GradientNoise | None:
        """Return None if the noise is not measured.

        Raises:
            TypeError: if the factor on lr would stay on the device and cannot be used there.
            ValueError: if there is no ref_batchsize, or parameters are on several devices.
        """
        if estimator is None and not any(map(needs_noise, self.rules)):
            return None
        if self.ref_batchsize is None:
            raise value_error(
                f"measuring the noise needs ref_batchsize, because averages extend over {HORIZON} updates of that size",
                "none",
                "pass the batch size at which the learning rate was tuned",
            )
        parameters = self.gradients.parameters
        devices = sorted({str(parameter.device) for parameter in parameters})
        if len(devices) > 1:
            raise value_error(
                "measuring the noise needs all parameters on one device", " and ".join(devices), "move them to one"
            )
        on_device = parameters[0].device.type != "cpu"
        if on_device:
            self._check_deferred_lr()
        return GradientNoise(self._backend, on_device=on_device, differenced=estimator == "differenced")

    def _check_deferred_lr(self) -> None:
        """Check that a factor on lr can stay on the device, see `DeferredLrFactor`."""
        device = self.gradients.parameters[0].device.type
        if isinstance(self._inner, _NOT_PROPORTIONAL_TO_LR):
            raise TypeError(
                f"on {device} a learning rate that depends on the noise needs an optimizer whose change is "
                f"proportional to it, but that of {type(self._inner).__name__} is not; use another inner optimizer"
            )
        if small := {str(p.dtype) for p in self.gradients.parameters if torch.finfo(p.dtype).bits < 32}:
            raise TypeError(
                f"on {device} a learning rate that depends on the noise needs parameters of at least 32 bits, because "
                f"it multiplies their change after the step, but some are {' and '.join(sorted(small))}; keep the "
                f"parameters in float32, and use torch.autocast"
            )
        for rule in self.rules:
            if isinstance(rule, ConstantTimescale) and rule.needs_noise:
                raise TypeError(
                    f"on {device} the weight decay must not depend on the noise, which the host does not read there, "
                    f"but {rule} makes it depend on it; use the rule without ConstantTimescale"
                )


def _check_max_grad_norm(max_grad_norm: float | None) -> float | None:
    if max_grad_norm is None:
        return None
    if isinstance(max_grad_norm, float) and max_grad_norm == math.inf:  # the common idiom for no clipping
        return max_grad_norm
    remedy = "omit it for no clipping"
    number = check_number(max_grad_norm, "max_grad_norm", remedy)
    if number == 0:
        raise value_error("max_grad_norm must be a finite number > 0", number, remedy)
    return number


def _check_finite(rule: object, scaling: Scaling) -> None:
    for factor in fields(scaling):
        value = getattr(scaling, factor.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(
                f"every factor of a rule must be finite, but {rule} returned {factor.name}={value}; return 1 if a "
                f"factor is unknown, as before the first estimate of the noise"
            )
