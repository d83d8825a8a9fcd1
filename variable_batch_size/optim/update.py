"""Make an update from the gradients of a step's microbatches: reduce, measure, clip, scale, step.

The stages of `Updater.apply`, in their order:

    reduce      this rank's share of the gradient, summed over the ranks
    measure     the noise, from the reduced gradient; only if it is measured
    clip        the reduced gradient, to the maximum norm
    scale       the gradient and the hyperparameters, by the factors of the rules
    step        the inner optimizer
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size.backend import Backend
from variable_batch_size.data.microbatching import Microbatch
from variable_batch_size.data.plan import Step
from variable_batch_size.optim.accumulation import (
    Accumulation,
    BufferedAccumulation,
    InPlaceAccumulation,
    check_dense,
    is_narrow,
    multiply,
)
from variable_batch_size.optim.backward_check import BackwardCheck
from variable_batch_size.optim.factors import scalings_of_groups
from variable_batch_size.optim.gradient_noise import GradientNoise
from variable_batch_size.optim.noise_support import UnmeasuredWarning, create_gradient_noise
from variable_batch_size.optim.options import UpdateOptions
from variable_batch_size.optim.participation import participation
from variable_batch_size.optim.progress import Progress
from variable_batch_size.optim.scaling import HyperparameterScaling
from variable_batch_size.optim.squared_norm import squared_norm
from variable_batch_size.optim.step_means import StepMeans
from variable_batch_size.optim.token_count import TokenCount
from variable_batch_size.optim.wrapper import stepping
from variable_batch_size.rules import Rule, RuleInput, Scaling
from variable_batch_size.rules.base import needs_noise

_SKIPPED = "Skipped an update: non-finite gradient; check the loss if this persists"


@final
class Updater:
    """Accumulates this rank's microbatches of one step, and then makes the update; see `CustomOptimizer`.

    Attributes:
        rules: the rule of each parameter group.
        ref_batchsize: reference batch size, in samples; None if there is none.
        options: the checked options.
        accumulation: this rank's share of the gradient of the step.
        check: what has changed the gradients since the last microbatch.
        participation: which parameters take part in an update.
        gradient_noise: the measured noise; None if it is not measured.
        progress: progress of the training, in updates at the reference.
        last_scaling: scaling of the first parameter group in the last update.
        reference_lr: learning rate of the first parameter group in the last update, before scaling.
        grad_norm: norm of the gradient of the last update before clipping, 0-D; None if nobody asks for it.
        token_count: counts by which the gradient is divided, if they are not its samples.
        step_means: means of logged values.
        inner_step_begun: whether the inner optimizer's step of the present update has begun.
    """

    def __init__(
        self,
        inner: Optimizer,
        backend: Backend,
        rules: tuple[Rule, ...],
        ref_batchsize: int | None,
        options: UpdateOptions,
    ) -> None:
        self.rules, self.ref_batchsize, self.options = rules, ref_batchsize, options.checked()
        self.rule_per_group = False  # whether the user passed a sequence of rules
        self.progress = Progress()
        self.last_scaling = Scaling()
        self.reference_lr: Any = inner.param_groups[0].get("lr", 1.0)
        self.grad_norm: Tensor | None = None
        self.inner_step_begun = False
        self.token_count, self.step_means = TokenCount(backend), StepMeans(backend)
        self._inner, self._backend = inner, backend
        self.refresh_parameters()
        self.gradient_noise = create_gradient_noise(inner, rules, ref_batchsize, self.options.noise, backend)
        deferred_lr = self.gradient_noise is not None and self.gradient_noise.on_device
        self._scaling = HyperparameterScaling(inner, backend, deferred_lr=deferred_lr)
        self._unmeasured = UnmeasuredWarning()

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters of the inner optimizer, in the order of its groups."""
        return [parameter for group in self._inner.param_groups for parameter in group["params"]]

    def refresh_parameters(self) -> None:
        """Start over with the parameters that the inner optimizer has now."""
        parameters, options = self.parameters, self.options
        noise = options.noise is not None or any(map(needs_noise, self.rules))
        buffered = noise or options.accumulation == "buffered" or any(map(is_narrow, parameters))
        self.accumulation: Accumulation = (BufferedAccumulation if buffered else InPlaceAccumulation)(
            parameters, self._backend
        )
        self.check = BackwardCheck(parameters)
        self.participation = participation(parameters, self._backend, find_unused=options.find_unused_parameters)
        self.agreed = False  # whether the ranks were compared
        self._found_inf: Tensor | None = None  # 0-D: number of non-finite microbatches under a GradScaler
        self._replay = False  # whether this rank has only a replay in the step
        self.accumulation.clear()
        self.check.begin(several=True)

    def clear(self) -> None:
        """Discard the accumulated microbatches, after an update or to start the step over."""
        self.accumulation.clear()
        self.check.remember()
        self._found_inf, self.inner_step_begun = None, False
        self.token_count.clear()
        self.step_means.clear()
        if self.gradient_noise is not None:
            self.gradient_noise.clear()

    def add(
        self,
        microbatch: Microbatch,
        following: Microbatch | None,
        *,
        inside_step: bool,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
        count: Any = None,
    ) -> None:
        """Accumulate a microbatch, whose `backward()` has run.

        Args:
            microbatch: the microbatch.
            following: the next microbatch of this rank in the same step; None after the last one.
            inside_step: whether it is not the first one of the step.
            found_inf: under a `GradScaler`, whether the gradient is non-finite, 0-D.
            grad_scale: the scale of the loss under a `GradScaler` that has not yet divided by it, 0-D.
            count: of the microbatch, if its loss counts something else than samples; see `TokenCount`.

        Raises:
            TypeError: if a gradient is sparse.
            RuntimeError: if there was no `backward()`, or something else has changed the gradients.
        """
        if not (self.agreed or inside_step):
            check_dense(self.parameters)
        self.token_count.check(count, self.options.reduction, noise=self.gradient_noise is not None)
        self._replay = microbatch.samples == 0
        unscaled = found_inf is not None and grad_scale is None
        fresh = self.check.fresh()
        accumulating = inside_step and self.accumulation.keeps_grad
        self.check.check(fresh, replay=self._replay, accumulating=accumulating, unscaled=unscaled)
        if found_inf is not None:
            self._use_buffer(inside_step)
            found_inf = found_inf * (not self._replay)
            self._found_inf = found_inf if self._found_inf is None else self._found_inf + found_inf
            grad_scale = torch.ones_like(found_inf) if grad_scale is None else grad_scale
        if self.gradient_noise is not None:
            factor = microbatch.samples / self._divisor(microbatch) ** 2
            present = [gradient for parameter in self.parameters if (gradient := parameter.grad) is not None]
            self.gradient_noise.add(present, factor, grad_scale)
        next_weight = None if following is None else self._weight_of(following)
        self.accumulation.add(fresh, self._weight_of(microbatch), next_weight, grad_scale)
        like = self.parameters[0]
        self.token_count.add(count, microbatch, like)
        weight = microbatch.samples / microbatch.batch_size if count is None else self.token_count.weight
        self.step_means.add(weight, like)
        self.check.remember()

    def agree(self) -> None:
        """Agree with the other ranks on the parameters that have gradients; every rank has to call it."""
        self.participation.agree(self.accumulation.has_gradient, replay=self._replay)

    def drop_current(self, *, inside_step: bool) -> None:
        """Drop the gradients that have come since the last microbatch, as `zero_grad()` does.

        Raises:
            RuntimeError: if they cannot be told from the microbatches of the step, which are in `.grad`, too.
        """
        if not (inside_step and self.accumulation.keeps_grad):
            self.accumulation.drop_current()
            self.check.remember()
        elif any(self.check.fresh()):
            raise RuntimeError(
                "zero_grad() within a step must leave the microbatches that step() has accumulated, but a backward() "
                'has added to their gradients in .grad since; pass accumulation="buffered" to the optimizer, which '
                "keeps them apart, or set requires_grad_(False) for these parameters during that backward(); after an "
                "exception call discard_step()"
            )

    def apply(self, step: Step, updates: int, samples: int) -> bool:
        """Sum the gradients over the ranks, and step the inner optimizer.

        Args:
            step: the accumulated step.
            updates: number of updates before this one.
            samples: number of samples of those updates.

        Returns:
            False if the update was skipped, because the host has read that a gradient is non-finite.
        """
        reference = step.batch_size if self.ref_batchsize is None else self.ref_batchsize
        update = RuleInput(step.batch_size, reference, updates, samples)
        if self.gradient_noise is None:
            scalings = self._apply_known_rules(update, step)
        else:
            scalings = self._apply_measured_rules(self.gradient_noise, update, step)
        if scalings is None:
            self.grad_norm = None if self.grad_norm is None else torch.full_like(self.grad_norm, math.nan)
            return False
        self._step_inner(scalings)
        self.last_scaling = scalings[0]
        self.progress.add(self.last_scaling.progress)
        if self.gradient_noise is not None:
            self.gradient_noise.commit()
            self._unmeasured.after_update(self.gradient_noise)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return progress and, if there are any, participation, noise and bias correction."""
        self.participation.check()
        noise = {} if self.gradient_noise is None else {"noise": self.gradient_noise.state_dict()}
        rates = {key: float(getattr(self.last_scaling, key)) for key in ("lr", "gradient")}
        own = {"progress": float(self.progress), "last_rates": {**rates, "reference_lr": float(self.reference_lr)}}
        own["counts"] = self.token_count.used
        own |= self.participation.state_dict()
        return {**self._reference(), **own, **noise, **self._scaling.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; noise and bias correction are reset if it has none, and the progress stays.

        A UserWarning tells if it was saved with other rules or another reference.
        """
        own = self._reference()
        changed = [f"{key} was {state[key]} and is {own[key]}" for key in own if state.get(key, own[key]) != own[key]]
        if changed and self._backend.world.rank == 0:
            warnings.warn(f"The training goes on differently: {', '.join(changed)}", UserWarning, stacklevel=3)
        if "progress" in state:
            self.progress = Progress(float(state["progress"]))
            rates = state["last_rates"]
            self.last_scaling = Scaling(lr=rates["lr"], gradient=rates["gradient"])
            self.reference_lr = rates["reference_lr"]
        self.participation.load_state_dict(state)
        self.agreed, self.step_means.names = False, None
        self.token_count.used = state.get("counts", self.token_count.used)
        self._scaling.load_state_dict(state)
        if self.gradient_noise is not None:
            self.gradient_noise.load_state_dict(state.get("noise"))

    # The stages. -------------------------------------------------------------------------------------------------

    def _apply_known_rules(self, update: RuleInput, step: Step) -> list[Scaling] | None:
        """Reduce, clip and scale by rules that need no noise; return their factors, None if the update is skipped."""
        scalings = scalings_of_groups(self.rules, update)
        # A factor on the gradient that all groups share, and that no clipping precedes, is multiplied together with the
        # weight, which saves a pass over the gradients.
        shared = self.options.max_grad_norm is None and not self.options.grad_norm and not self.rule_per_group
        reduced = self._reduce(step, scalings[0].gradient if shared else 1.0)
        if reduced is None:
            return None
        self._clip(reduced)
        if not shared:
            self._scale_gradients(scalings)
        return scalings

    def _apply_measured_rules(self, noise: GradientNoise, update: RuleInput, step: Step) -> list[Scaling] | None:
        """Reduce, measure, clip and scale by rules that may use the noise; None if the update is skipped."""
        squares: list[Tensor] = []
        reduced = self._reduce(step, 1.0, squares)
        if reduced is None:
            return None
        statistics = noise.statistics(squares[0], reduced)
        if statistics.finite is False:
            warnings.warn(_SKIPPED, RuntimeWarning, stacklevel=6)
            return None
        if isinstance(statistics.finite, Tensor):
            for gradient in reduced:
                gradient.copy_(torch.where(statistics.finite, gradient, 0))
        own = [parameter.grad for parameter in self.parameters]
        size, groups, ref = step.batch_size, step.num_microbatches, update.ref_batchsize
        measured = noise.update(statistics, own, batch_size=size, groups=groups, ref=ref)
        device = reduced[0].device if noise.on_device else None
        scalings = scalings_of_groups(self.rules, replace(update, noise=measured), device)
        if isinstance(statistics.finite, Tensor):
            pairs = enumerate(scalings)
            scalings = [self._zero_if_not(statistics.finite, scaling, group) for group, scaling in pairs]
        self._clip(reduced)
        self._scale_gradients(scalings)
        return scalings

    def _reduce(self, step: Step, factor: float, squares: list[Tensor] | None = None) -> list[Tensor] | None:
        """Return `factor` times the gradient, summed over the ranks.

        It is None if the update is skipped: a `GradScaler` found it non-finite, or nothing was counted.

        Args:
            step: the accumulated step.
            factor: a factor on all gradients.
            squares: gets the sum of the weighted squares over all ranks, (1,).
        """
        accumulation, used = self.accumulation, self.accumulation.has_gradient
        summed = self.participation.summed(used)
        self.check.forget()
        gradients = accumulation.finish(factor, summed)
        if not gradients:
            raise RuntimeError(
                "an update needs a gradient of at least one parameter, but backward() gave none to the parameters of "
                "this optimizer; compute the loss from them, and set requires_grad"
            )
        if squares is not None and self.gradient_noise is not None:
            squares.append(self.gradient_noise.local_squares(gradients))
        found_inf = [] if self._found_inf is None else [self._found_inf]  # 0-D
        message = self.participation.message(used, replay=self._replay)
        counts, means = self.token_count.message(gradients[0]), self.step_means.message(gradients[0])
        # Ranks may have different pending operations. These must not be in the graph of the collective, which has to
        # be the same on all ranks.
        self._backend.mark_step()
        self._backend.all_reduce_sum([*gradients, *(squares or ()), *found_inf, *message, *counts, *means])
        members = self.participation.settle(message)
        self.step_means.settle(means, self.token_count.total(counts))
        if members is not None:
            accumulation.exclude(members)
            pairs = zip(gradients, members, strict=True)
            gradients = [gradient for gradient, member in pairs if member]
        counted = self.token_count.settle(counts, gradients, step.batch_size)
        if not counted or any(self._backend.host(found).item() for found in found_inf):
            return None
        return gradients

    def _clip(self, gradients: Sequence[Tensor]) -> None:
        """Multiply the gradients by min(1, max_grad_norm / |G|); keep |G| if it is asked for."""
        max_norm = self.options.max_grad_norm
        if (max_norm is None and not self.options.grad_norm) or not gradients:
            return
        self.grad_norm = squared_norm(gradients).sqrt()
        if max_norm is not None:
            members = [parameter for parameter in self.parameters if parameter.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(members, max_norm, self.grad_norm)

    def _scale_gradients(self, scalings: Sequence[Scaling]) -> None:
        """Multiply the gradients of each parameter group by its factor."""
        factors = [scaling.gradient for scaling in scalings]
        measured = self.gradient_noise is not None
        if measured and not any(isinstance(factor, Tensor) or factor != 1 for factor in factors):
            return  # no rule that uses the noise has such a factor, as a rule
        for group, factor in zip(self._inner.param_groups, factors, strict=True):
            gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
            multiply(gradients, factor, self._backend)

    def _step_inner(self, scalings: Sequence[Scaling]) -> None:
        lr = self._inner.param_groups[0].get("lr", 1.0)
        self.reference_lr = lr.clone() if isinstance(lr, Tensor) else lr
        with self._scaling.applied(scalings), stepping(self._inner):
            self.inner_step_begun = True
            self._inner.step()

    def _reference(self) -> dict[str, Any]:
        """Return what scales the hyperparameters, in words, without memory addresses."""
        rules = [re.sub(r"(?i) at 0x[0-9a-f]+", "", repr(rule)) for rule in self.rules]
        return {"rule": ", ".join(dict.fromkeys(rules)), "ref_batchsize": self.ref_batchsize}

    # Details. ----------------------------------------------------------------------------------------------------

    def _use_buffer(self, inside_step: bool) -> None:
        """Accumulate in a buffer from this step on: a `GradScaler` may change its scale between microbatches."""
        if not self.accumulation.keeps_grad:
            return
        if inside_step:
            raise RuntimeError(
                "all microbatches of a step must reach the optimizer through the GradScaler, or none, but the first "
                "ones of this step did not; call scaler.step(optimizer) for each of them"
            )
        self.accumulation = BufferedAccumulation(self.parameters, self._backend)

    def _zero_if_not(self, finite: Tensor, scaling: Scaling, group: int) -> Scaling:
        """Multiply the factor on lr and the progress of a group by `finite`, 0-D, which is 0 or 1."""
        like = finite.float()
        factors = {"lr": scaling.lr, "progress": scaling.progress}
        for name, factor in factors.items():
            known = isinstance(factor, Tensor)
            factors[name] = like * (factor if known else self._backend.scalar(factor, like, f"{name} {group}"))
        return replace(scaling, **factors)

    def _weight_of(self, microbatch: Microbatch) -> float:
        """Return the factor on a microbatch's gradient such that the sum over the step is its mean over samples."""
        return microbatch.samples / (microbatch.batch_size * self._divisor(microbatch))

    def _divisor(self, microbatch: Microbatch) -> int:
        """Return the number by which to divide a microbatch's gradient to get that of its mean loss."""
        return microbatch.rows if self.options.reduction == "sum" else 1
