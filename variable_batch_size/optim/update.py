"""Make an update from the gradients of a step's microbatches: reduce, measure, clip, scale, step.

The stages of `Updater.apply`, in their order:

    reduce      this rank's share of the gradient, summed over the ranks
    skip        the update, if the norm of the reduced gradient is too large; only if that is asked for
    measure     the noise, from the reduced gradient; only if it is measured
    clip        the reduced gradient, to the maximum norm
    scale       the gradient and the hyperparameters, by the factors of the rules
    step        the inner optimizer
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import is_
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import without_addresses
from variable_batch_size.backend import Backend
from variable_batch_size.data.batches import Batch
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.beside.means import StepMeans, TokenCount
from variable_batch_size.optim.sums.overflows import Overflows, check_scaled
from variable_batch_size.optim.beside.same_updates import Facts, SameUpdates, numbers_of_groups
from variable_batch_size.optim.beside.skipping import LargeGradients
from variable_batch_size.optim.loops.counts import NOT_WEIGHTED, counts_nothing
from variable_batch_size.optim.noise.gradient_noise import (
    GradientNoise,
    Statistics,
    UnmeasuredWarning,
    create_gradient_noise,
)
from variable_batch_size.optim.noise.second_moment import create_second_moment
from variable_batch_size.optim.options import UpdateOptions
from variable_batch_size.optim.scaling.rule_check import Chosen, scalings_of_groups
from variable_batch_size.optim.scaling.scaling import HyperparameterScaling
from variable_batch_size.optim.sums.base import Sum
from variable_batch_size.optim.sums.squares import Needs
from variable_batch_size.optim.tensors.arithmetic import (
    check_dense,
    collect_gradients,
    local_parts,
    multiply,
    scalar_dtype,
    squared_norm,
)
from variable_batch_size.optim.wrapper import list_parameters, lr_of, stepping
from variable_batch_size.rules import Rule, RuleInput, Scaling
from variable_batch_size.rules.base import scales_betas
from variable_batch_size.rules.selection import rules_for_groups


@final
class Progress:
    """A sum of floats on the host, or of 0-D tensors on a device without a host sync.

    On a device the sum is stored as an integer part and a fractional part, so that float32 loses no digits in a long
    training.
    """

    def __init__(self, value: float = 0.0) -> None:
        self._value: float | Tensor = value  # on a device (2,): the integer part, and the fraction in [0, 1)

    def add(self, progress: Any) -> None:
        """Add the progress of one update, a float or a 0-D tensor, in updates at the reference."""
        if not isinstance(progress, Tensor):
            self._value += progress
            return
        value = self._value if isinstance(self._value, Tensor) else progress.new_tensor(divmod(self._value, 1.0))
        integer, fraction = value.unbind()
        fraction = fraction + progress
        self._value = torch.stack([integer + fraction.floor(), fraction - fraction.floor()])

    def reader(self) -> Callable[[], float]:
        """Return a function that returns the present sum; calling it later avoids a wait for the device."""
        value = self._value
        return lambda: value if isinstance(value, float) else sum(value.cpu().tolist())

    def __float__(self) -> float:
        return self.reader()()


_SKIPPED = "Skipped an update: non-finite gradient; check the loss if this persists"


class OtherSettingsWarning(UserWarning):
    """A state was saved with other rules, another reference batch size, or other microbatches to measure."""


@final
class Updater:
    """Makes an update of the gradient of each step; see `CustomOptimizer`."""

    def __init__(self, inner: Optimizer, backend: Backend, chosen: Chosen, options: UpdateOptions, total: Sum) -> None:
        self.rules, self.ref_batchsize, self.rule_per_group = chosen
        self.options = options.validate()
        self.progress = Progress()
        self.last_scaling = Scaling()  # of the first parameter group in the last update
        self.reference_lr: Any = lr_of(inner.param_groups[0])  # its lr then, before scaling
        self.grad_norm: Tensor | None = None  # of the last update before clipping, 0-D, if it is asked for or limited
        self.sum = total
        self._inner, self._backend = inner, backend
        self.gradient_noise = create_gradient_noise(inner, self.rules, self.ref_batchsize, self.options.noise, backend)
        self.second_moment = create_second_moment(inner, self.rules, self.ref_batchsize, backend)
        self.token_count, self.step_means = TokenCount(backend), StepMeans(backend)
        self._overflows, self._same_updates = Overflows(backend), SameUpdates(backend)
        self._register_entries()
        self.use_parameters()
        deferred_lr = self.gradient_noise is not None and self.gradient_noise.on_device
        limit = self.options.skip_grad_norm
        selects = limit is not None and backend.static_graph
        scale_betas = [*map(scales_betas, self.rules)] if selects else []
        how = {"deferred_lr": deferred_lr, "selects": selects}
        self._scaling = HyperparameterScaling(inner, backend, **how, scale_betas=scale_betas)
        self.skipper = None if limit is None else LargeGradients(limit, inner, backend, self.parameters)
        self._numbers_of_rules = backend.numbers_as_inputs(inner)
        self._unmeasured = UnmeasuredWarning()

    def _register_entries(self) -> None:
        """Let the message have what the ranks sum besides gradients."""
        message = self.sum.message
        if self.gradient_noise is not None:
            message.register("squares", self.gradient_noise, measured=True)
        message.register("counts", self.token_count, measured=True)
        message.register("means", self.step_means, measured=True)
        if self.second_moment is not None:
            message.register("second moments", self.second_moment)
        message.register("overflows", self._overflows)
        message.register("facts", self._same_updates)

    def use_parameters(self, *, keep: bool = False) -> None:
        """Train the parameters that the groups have now; `keep`: the gradients of a first microbatch are in `.grad`."""
        self._known_groups = [list(group["params"]) for group in self._inner.param_groups]
        self.parameters = list_parameters(self._inner.param_groups)  # each once, in the order of the groups
        self.sum.use_parameters(self.parameters, keep=keep)
        self.sum.message.clear()
        self._await_agreement()

    def _await_agreement(self) -> None:
        self.agreed = False  # whether the ranks have compared themselves before a first update
        self._same_updates.forget()

    @property
    def has_new_groups(self) -> bool:
        """Whether the groups of the inner optimizer have other parameters than those that are trained."""
        groups, known = self._inner.param_groups, self._known_groups
        return len(groups) != len(known) or not all(
            len(group["params"]) == len(parameters) and all(map(is_, group["params"], parameters))
            for group, parameters in zip(groups, known, strict=True)
        )

    def rules_for(self, number: int) -> tuple[Rule, ...]:
        """Return the rules of this number of parameter groups; raise ValueError if each group has one of its own."""
        return rules_for_groups(self.rules if self.rule_per_group else self.rules[0], number)

    def use_groups(self, rules: tuple[Rule, ...], *, keep: bool = False) -> None:
        """Train the parameters that the groups have now, by these rules; `keep`: see `use_parameters`."""
        self.rules = rules
        for group in self._inner.param_groups:  # one that was appended to the list may lack some
            for name, default in self._inner.defaults.items():
                group.setdefault(name, copy.deepcopy(default))
        self.use_parameters(keep=keep)

    @property
    def measures_microbatches(self) -> bool:
        """Whether an update depends on how its samples are cut into microbatches."""
        return self.gradient_noise is not None or self.second_moment is not None

    def needs(self, batch: Batch | None) -> Needs:
        """Return what an update has to measure of each microbatch, as far as it is known."""
        noise, second_moment, always = self.gradient_noise, self.second_moment, self._backend.static_graph
        return Needs(
            norm=noise is not None and (always or batch is None or batch.num_microbatches > 1),
            elements=second_moment is not None
            and (always or batch is None or second_moment.needs_squares_of(batch.batch_size)),
        )

    def clear(self) -> None:
        """Discard the accumulated microbatches, after an update or to start the step over."""
        self.sum.clear()
        self.sum.message.clear()
        if self.skipper is not None:
            self.skipper.discard()

    def commit(self) -> None:
        """Count the update that was just made."""
        if self.skipper is not None:
            self.skipper.commit()

    def add(
        self,
        microbatch: Microbatch,
        following: Microbatch | None,
        *,
        inside_step: bool,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
        count: Any = None,
        weighted: bool = False,
    ) -> None:
        """Count a microbatch, whose `backward()` has run.

        Args:
            microbatch: the microbatch.
            following: the next one of this rank in the same step; None after the last one.
            inside_step: whether it is not the first one of the step.
            found_inf: under a `GradScaler`, whether the gradient is non-finite, 0-D.
            grad_scale: the scale of the loss under a `GradScaler` that has not yet divided by it, 0-D.
            count: of the microbatch, if its loss counts something else than samples; see `TokenCount`.
            weighted: whether the losses of the step are divided by totals of the update, see `Counts`.
        """
        if not (self.agreed or inside_step):
            check_dense(self.parameters)
        self._check_count(microbatch, count, weighted=weighted)
        check_scaled(self.sum.scale, found_inf, grad_scale)
        if self.second_moment is not None:
            self.second_moment.batch_size = microbatch.batch_size
        norm, elements, factor = self.sum.measure(microbatch, counted=weighted or count is not None)
        if self.gradient_noise is not None and norm is not None:
            self.gradient_noise.add_square(norm, factor, self.sum.scale)
        if self.second_moment is not None:
            self.second_moment.add(elements, factor, self.sum.scale)
        like = local_parts(self.parameters[:1])
        # Before the gradients of any microbatch get their weight: another order would be another graph.
        self.token_count.add(count, microbatch, like[0])
        weight = microbatch.samples / microbatch.batch_size if count is None else self.token_count.weight
        self.step_means.add(weight, like[0])
        self.sum.message.count(microbatch, like)
        self.sum.add(microbatch, following)
        if found_inf is not None and self._overflows.add(found_inf * (microbatch.samples > 0)):
            self.sum.flush()

    def _check_count(self, microbatch: Microbatch, count: Any, *, weighted: bool) -> None:
        """Raise an error unless a microbatch may have this count, and its loss has carried its weight."""
        if weighted and microbatch.samples and not self.sum.carries_weight:
            raise RuntimeError(NOT_WEIGHTED.format("step() came without optimizer.backward()"))
        if weighted and count is not None:
            raise RuntimeError(
                "a loss has one way to its denominators, but step() has count= in an update of vbs.updates(counts=); "
                "omit count=, and divide by update.counts"
            )
        self.token_count.check(count, self.options.reduction, noise=self.measures_microbatches)

    def apply(self, step: Batch, epoch: int, samples: int, begin: Callable[[], None]) -> bool:
        """Sum the gradients over the ranks, and step the inner optimizer; return False if the update was skipped.

        It is skipped if the host has read that the gradient is non-finite or too large. `samples` are those before this
        update; `begin` is called right before the inner optimizer's step, which changes the weights.

        Raises:
            RanksDifferError: on every rank, if the facts of the update differ between ranks, or did some updates ago.
        """
        reference = step.batch_size if self.ref_batchsize is None else self.ref_batchsize
        update = RuleInput(step.batch_size, reference, step.step, samples)
        noise = self.gradient_noise
        scalings = None if noise is not None else self._scalings(update, step)
        factor = float(scalings[0].gradient) if scalings is not None and self._shares_factor else None
        if self._same_updates.compares:
            self._same_updates.expect(self._facts(update, epoch))
        reduced = self._reduce(step, factor)
        if reduced is None:
            self._forget_norm()
            return False
        statistics = None if noise is None else noise.statistics(self.sum.message["squares"][0], reduced)
        norm = None if self.skipper is None else _norm(reduced, statistics)
        skips = self._is_too_large(norm, update)
        if skips is True:
            return False
        finite: bool | Tensor = True
        if noise is not None and statistics is not None:
            if statistics.finite is False:
                warnings.warn(_SKIPPED, RuntimeWarning, stacklevel=stacklevel_of_user())
                self._forget_norm()
                return False
            if isinstance(skips, Tensor):  # as if the gradient were not finite: noise and progress stay
                statistics = statistics._replace(finite=statistics.finite & ~skips)
            finite = statistics.finite
            if isinstance(finite, Tensor):
                _zero_tensors_unless(finite, local_parts(reduced))
            scalings = self._scalings_by_noise(noise, statistics, update, step)
        assert scalings is not None
        self._clip(reduced, step, finite, None if noise is not None else norm)
        self.grad_norm = self.grad_norm if norm is None else norm
        if noise is not None or not self._shares_factor:
            self._scale_gradients(scalings)
        self._step_inner(scalings, step, begin)
        self.last_scaling = scalings[0]
        if self.skipper is not None and self.skipper.skips is not None and noise is None:
            self.last_scaling = self._zero_unless(~self.skipper.skips, scalings[0], "made")
        self.progress.add(self.last_scaling.progress)
        if noise is not None:
            noise.commit()
            self._unmeasured.after_update(noise)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return progress and, if there are any, participation, noise and bias correction."""
        noise: dict[str, Any] = {"noise": {}} if self.measures_microbatches else {}
        if self.gradient_noise is not None:
            noise = {"noise": self.gradient_noise.state_dict()}
        rates = {key: float(getattr(self.last_scaling, key)) for key in ("lr", "gradient")}
        rates["reference_lr"] = float(self.reference_lr)
        state: dict[str, Any] = {"progress": float(self.progress), "last_rates": rates}
        if self.skipper is not None:
            state |= self.skipper.state_dict()
        return {**self._settings(), **state, **self._state_of_sums(), **noise, **self._scaling.state_dict()}

    def _state_of_sums(self) -> dict[str, Any]:
        """Return what the ranks have agreed on, and whether the steps have counts."""
        names = self.step_means.names if self._backend.elastic else None
        logged = {} if names is None else {"logged": list(names)}
        agreed: dict[str, Any] = {}
        self._same_updates.check()
        if (participation := self.sum.participation) is not None:
            participation.check()
            agreed = participation.state_dict()
        return {"counts": self.token_count.used, **logged, **agreed}

    def load_state_dict(self, state: dict[str, Any], minibatch_size: int) -> None:
        """Restore a state; noise and bias correction are reset if it has none, and the progress stays.

        Warns by `OtherSettingsWarning` if it was saved with other rules, another reference, or other microbatches.
        """
        present = self._settings() | ({"minibatch_size": minibatch_size} if self.measures_microbatches else {})
        changed = [
            f"{key} was {state[key]} and is {present[key]}"
            for key in present
            if state.get(key, present[key]) != present[key]
        ]
        if changed and self._backend.world.rank == 0:
            warnings.warn(
                f"Resumed with other settings: {', '.join(changed)}", OtherSettingsWarning, stacklevel_of_user()
            )
        if "progress" in state:
            self.progress = Progress(float(state["progress"]))
            rates = state["last_rates"]
            self.last_scaling = Scaling(lr=rates["lr"], gradient=rates["gradient"])
            self.reference_lr = rates["reference_lr"]
        if self.sum.participation is not None:
            self.sum.participation.load_state_dict(state)
        self._await_agreement()
        logged = state.get("logged") if self._backend.elastic else None
        self.step_means.names = None if logged is None else tuple(logged)
        self.token_count.used = state.get("counts", self.token_count.used)
        self._scaling.load_state_dict(state)
        if self.gradient_noise is not None:
            self.gradient_noise.load_state_dict(state.get("noise"))
        if self.skipper is not None:
            self.skipper.load_state_dict(state)

    # The stages. -------------------------------------------------------------------------------------------------

    def _reduce(self, step: Batch, factor: float | None) -> list[Tensor] | None:
        """Return `factor` (None: there is none in any update) times the gradient, summed over the ranks.

        It is None if the update is skipped here: a `GradScaler` found it non-finite, or nothing was counted.
        """
        gradients, message = self.sum.finish(step, factor), self.sum.message
        self._same_updates.compare(message["facts"])
        counts = message["counts"]
        self.step_means.compute_means(message["means"], self.token_count.total(counts))
        counted = self.token_count.divide_by_counts(counts, gradients, step.batch_size)
        if not counted or counts_nothing(step) or self._overflows.found(message["overflows"]):
            return None
        if not gradients:
            raise RuntimeError(
                "an update needs a gradient of at least one parameter, but backward() gave none to the parameters of "
                "this optimizer; compute the loss from them, and set requires_grad"
            )
        return gradients

    def _scalings(self, update: RuleInput, step: Batch, device: torch.device | None = None) -> list[Scaling]:
        """Return the scaling of each group, once it is known that the update can be made by them."""
        scalings = scalings_of_groups(self.rules, update, device)
        if self.second_moment is not None:
            self.second_moment.check(step, self.rules, scalings)
        return scalings

    def _scalings_by_noise(
        self, noise: GradientNoise, statistics: Statistics, update: RuleInput, step: Batch
    ) -> list[Scaling]:
        """Measure the noise of an update, and return the scaling of each group; of factors 0 if it is not finite."""
        gradients = [parameter.grad for parameter in self.parameters]
        size, groups, ref = step.batch_size, step.num_microbatches, update.ref_batchsize
        measured = noise.update(statistics, gradients, batch_size=size, groups=groups, ref=ref)
        device = self.parameters[0].device if noise.on_device else None
        with self._numbers_of_rules:
            scalings = self._scalings(replace(update, noise=measured), step, device)
        if not isinstance(statistics.finite, Tensor):
            return scalings
        return [self._zero_unless(statistics.finite, scaling, group) for group, scaling in enumerate(scalings)]

    def _forget_norm(self) -> None:
        """Note that an update has no gradient whose norm is known."""
        if self.skipper is not None or self.options.grad_norm or self.options.max_grad_norm is not None:
            self.grad_norm = torch.full((), math.nan, device=self.parameters[0].device)

    def _is_too_large(self, norm: Tensor | None, update: RuleInput) -> bool | Tensor:
        """Return whether an update is skipped because of its norm; 0-D where the device decides."""
        if self.skipper is None or norm is None:
            return False
        self.grad_norm = norm
        return self.skipper.judge(norm, update.batch_size, first=update.samples == 0)

    def _facts(self, update: RuleInput, epoch: int) -> Facts:
        """Return what all ranks must have in common in an update, by name."""
        return {
            "epoch": epoch,
            "step": update.updates,
            "batch_size": update.batch_size,
            "samples": update.samples,
            **numbers_of_groups(self._inner.param_groups),
            **({} if self.skipper is None else {"skip_grad_norm": self.skipper.limit(update.batch_size)}),
            "parameters that require gradients": [
                number for number, parameter in enumerate(self.parameters) if parameter.requires_grad
            ],
        }

    def _clip(
        self, gradients: Sequence[Tensor], step: Batch, finite: bool | Tensor = True, norm: Tensor | None = None
    ) -> None:
        """Multiply the gradients by min(1, max_grad_norm / |G|), if |G| is known by `norm`; keep |G| if asked for."""
        if self.second_moment is not None:
            self.second_moment.subtract_squared_mean(step, finite)
        max_norm = self.options.max_grad_norm
        if (max_norm is None and not self.options.grad_norm) or not gradients:
            return
        self.grad_norm = squared_norm(gradients).sqrt() if norm is None else norm
        if max_norm is not None:
            factor = torch.clamp(max_norm / (self.grad_norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_
            for device in dict.fromkeys(gradient.device for gradient in gradients):
                on_device = [gradient for gradient in gradients if gradient.device == device]
                multiply(on_device, factor.to(device), self._backend)
            if self.second_moment is not None:
                self.second_moment.clip(factor)

    def _scale_gradients(self, scalings: Sequence[Scaling]) -> None:
        """Multiply the gradients of each group by the factor of its rule."""
        factors = [scaling.gradient for scaling in scalings]
        measured = self.gradient_noise is not None
        if measured and not any(isinstance(factor, Tensor) or factor != 1 for factor in factors):
            return  # no rule that uses the noise has such a factor, as a rule
        for group, factor in zip(self._inner.param_groups, factors, strict=True):
            multiply(collect_gradients(dict.fromkeys(group["params"])), factor, self._backend)

    def _step_inner(self, scalings: Sequence[Scaling], step: Batch, begin: Callable[[], None]) -> None:
        """Step the inner optimizer with scaled hyperparameters; call `begin` right before."""
        lr = lr_of(self._inner.param_groups[0])
        self.reference_lr = lr.clone() if isinstance(lr, Tensor) else lr
        # First: it sends the counts of the optimizer to the device, whose tensors `numbers_as_inputs` must know.
        selecting = nullcontext() if self.skipper is None else self.skipper.selecting()
        skips = None if self.skipper is None else self.skipper.skips
        with selecting, self._scaling.apply(scalings, skips), stepping(self._inner):
            begin()
            if self.second_moment is not None:
                self.second_moment.apply(step, self.rules)
            self._inner.step()

    def _settings(self) -> dict[str, Any]:
        """Return what scales the hyperparameters, in words."""
        rules = [without_addresses(repr(rule)) for rule in self.rules]
        return {"rule": ", ".join(dict.fromkeys(rules)), "ref_batchsize": self.ref_batchsize}

    # The factors. ------------------------------------------------------------------------------------------------

    @property
    def _shares_factor(self) -> bool:
        """Whether all groups share a factor that needs no noise and that no clipping precedes.

        It is multiplied together with the weight, which saves a pass over the gradients.
        """
        options = self.options
        norm = self.skipper is not None or options.max_grad_norm is not None or options.grad_norm
        return self.gradient_noise is None and not (self.rule_per_group or norm)

    def _zero_unless(self, finite: Tensor, scaling: Scaling, group: object) -> Scaling:
        """Multiply the factor on lr and the progress of a group by `finite`, 0-D, which is 0 or 1."""
        like = finite.to(scalar_dtype(self.parameters))
        factors = {"lr": scaling.lr, "progress": scaling.progress}
        for name, factor in factors.items():
            known = isinstance(factor, Tensor)
            factors[name] = like * (factor if known else self._backend.scalar(factor, like, f"{name} {group}"))
        return replace(scaling, **factors)


def _norm(gradients: Sequence[Tensor], statistics: Statistics | None) -> Tensor:
    """Return the norm of a gradient, 0-D, whose square may have been measured."""
    if statistics is None:
        return squared_norm(gradients).sqrt()
    square = statistics.squared_norm
    return torch.as_tensor(square, dtype=None if isinstance(square, Tensor) else torch.float64).sqrt()


def _zero_tensors_unless(finite: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set tensors to 0, in place, if `finite`, 0-D, is false."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    zeros = {dtype: tensors[0].new_zeros((), dtype=dtype) for dtype in dtypes}
    for tensor in tensors:
        tensor.copy_(torch.where(finite, tensor, zeros[tensor.dtype]))
